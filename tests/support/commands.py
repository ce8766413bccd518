"""Running our own modules as child processes."""

import asyncio
import sys


async def run_module(module: str, *arguments: str) -> None:
    """Run `python -m module`; what it needs (mlx, say) stays out of the tests' process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
