"""report.html of a finished run, opened in headless Chromium: curves, samples and timings are drawn; keeps a screenshot."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from common import MILES, ROOT, check, finish, run

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=4000",
]


def main() -> None:
    run_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "quickstart"
    browser = shutil.which("chromium") or shutil.which("google-chrome") or os.environ.get("CHROME", "")
    check("a Chromium is installed", browser or "none: install Debian's chromium", bool(browser))
    run([*MILES, "report", str(run_dir)])
    page = run_dir / "report.html"
    check("report names no other host", "none", not re.search(r"(src|href)=[\"']?(https?:)?//", page.read_text()))
    picture = run_dir / "report.png"
    with tempfile.TemporaryDirectory() as profile:
        common = [browser, *FLAGS, f"--user-data-dir={profile}"]
        run([*common, "--window-size=1280,3600", f"--screenshot={picture}", page.as_uri()])
        dom = run([*common, "--dump-dom", page.as_uri()]).stdout
    check("curves drawn (svg paths)", dom.count("<path"), dom.count("<path") > 3)
    for word in ("reward", "samples", "collect", "update"):
        check(f"shows {word}", word in dom.lower(), word in dom.lower())
    check("screenshot to look at", picture, picture.stat().st_size > 20_000)
    finish()


if __name__ == "__main__":
    main()
