"""A scripted editor for tests: performs one step at each opening, and records the text it was shown."""

from pathlib import Path

from tests.support.waiting import until

# Bounded: 400 looks of a twentieth of a second.
_SCRIPT = """#!/bin/sh
n=$(($(cat "{root}/n" 2>/dev/null || echo 0) + 1))
echo $n > "{root}/n"
cp "$1" "{root}/part" && mv "{root}/part" "{root}/seen-$n"
if [ -e "{root}/wait-$n" ]; then
  i=0
  while [ ! -e "{root}/go-$n" ] && [ $i -lt 400 ]; do sleep 0.05; i=$((i + 1)); done
fi
if [ -e "{root}/step-$n" ]; then . "{root}/step-$n"; fi
"""


class ScriptedEditor:
    """The steps of the user, one for each opening; after the last step, nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._steps = 0
        root.mkdir()
        self.command = f"sh {root}/editor.sh"
        (root / "editor.sh").write_text(_SCRIPT.format(root=root))

    def types(self, old: str, new: str) -> "ScriptedEditor":
        """Replace a text, by sed's rules."""
        return self.runs(f'sed \'s|{old}|{new}|\' "$1" > "$1.new" && mv "$1.new" "$1"')

    def runs(self, script: str, *, waits: bool = False) -> "ScriptedEditor":
        """Run a step of the shell, in which $1 is the file; with `waits` only once `go` was called."""
        self._steps += 1
        (self._root / f"step-{self._steps}").write_text(f"{script}\n")
        if waits:
            (self._root / f"wait-{self._steps}").touch()
        return self

    async def opened(self, number: int) -> None:
        """Wait until the file is open for the nth time."""
        path = self._root / f"seen-{number}"
        await until(path.exists, what="the editor")

    def go(self, number: int) -> None:
        """Let a step that waits go on."""
        (self._root / f"go-{number}").touch()

    def seen(self, number: int) -> str:
        """Return what the nth opening showed."""
        return (self._root / f"seen-{number}").read_text()

    @property
    def openings(self) -> int:
        """Return how often it was opened."""
        return len(list(self._root.glob("seen-*")))
