"""Debian's Chromium, without a window and without the network, as selenium drives it."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *(
        "--disable-dev-shm-usage",
        "--allow-file-access-from-files",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ),
]


def missing() -> str:
    """What a browser lacks here, in words; empty where it can run."""
    found = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"no {' and no '.join(found)} here: apt-get install chromium chromium-driver"
        if found
        else ""
    )


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 900, *more: str) -> Iterator[Any]:
    """A browser with a profile of its own, ended afterwards; its log has the console."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            *more,
        ):
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.set_script_timeout(60)
            yield driver
        finally:
            driver.quit()


def opened(driver: Any, page: Path, seconds: float = 60) -> None:
    """Opens a report and waits until all of it is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(page.as_uri())
    WebDriverWait(driver, seconds, poll_frequency=0.02).until(
        lambda one: one.execute_script("return document.documentElement.dataset.ready")
    )
