"""The API kinds: what may be declared and what is reported. Types and pure helpers only; nothing here does I/O."""
