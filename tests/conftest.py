"""Fixtures for tests of several rooms: a browser and a GPU. Without them tests are skipped with the reason."""

import functools
import gc
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpcore2
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Every worker has one core. Without these, torch starts a thread per core in each worker and in each child process.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


# Nothing is freed while modules are imported and tests collected, but searching for garbage took half of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """Turns garbage collection on again, for what tests make: the modules of torch and others are not searched each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that use a PostgreSQL server as `integration`, before markers select tests."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "postgres" in getattr(item, "fixturenames", ()) or "postgresql" in parameters.values():
            item.add_marker(pytest.mark.integration)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Undoes `start_logging` after each test that runs a command: pytest 8 would capture no log line of later tests."""
    root = logging.getLogger("shoal")
    handlers, level, propagate = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Shares one TLS context among all HTTP clients: each would read the list of certificate authorities (25 ms)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api",
        reason="needs a browser: pip install 'shoal-rl[browser]', playwright install chromium",
    )
    options = {
        # The system's, where there is one: Playwright's own may not be installed.
        "executable_path": shutil.which("chromium") or shutil.which("google-chrome"),
        "args": ["--no-sandbox"] if os.geteuid() == 0 else [],
    }
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(**options)
        except api.Error as error:
            pytest.skip(
                f"no Chromium: playwright install chromium, or the system's package ({error.message[:80]})"
            )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """Yields a page whose console must show no errors except lost connections, which tests cause themselves."""
    context = chromium.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    # On a busy machine a snapshot is taken only every 30 s.
    page.set_default_timeout(75_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    yield page
    context.close()
    assert [error for error in errors if "net::ERR_" not in error] == []


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the source of axe-core, which finds accessibility errors of a page. It is fetched from the npm registry."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, to fetch axe-core")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        [npm, "install", "--silent", "--no-save", "--prefix", str(folder), "axe-core@4"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        pytest.skip(f"npm could not fetch axe-core: {done.stderr[-200:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Returns where Triton's kernels can run: "cuda", or "cpu" under Triton's interpreter, which knows no bfloat16 products."""
    import torch  # not wanted by most tests

    if torch.cuda.is_available():
        return "cuda"
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs kernels on a CPU")
    return "cpu"
