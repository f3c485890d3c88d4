"""What a fresh process loads."""

import subprocess
import sys


def loaded_by(code: str) -> set[str]:
    """Which modules a fresh process has loaded after running ``code``."""
    program = f"import sys\n{code}\nprint('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    _, _, modules = done.stdout.rpartition("LOADED")
    return set(modules.split())
