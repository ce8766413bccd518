"""HTTP: routes, bodies, streams. What is asked and answered is in `openai/`, what is made in `batch/`."""
