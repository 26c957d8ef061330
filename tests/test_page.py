"""The page in a real browser: it renders, sorts, filters, tells values, and fits a phone."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_analysis import CUDA, LLAMA, VIRTUAL, cell, grid, out_of_memory, spec, study, walk

from sweep import importing
from sweep.analysis import VIRTUAL_SENTENCE
from sweep.page import page
from sweep.record import CellRecord, Failure, Phase, Status

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
PHONE, DESKTOP = (390, 844), (1280, 900)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not CHROMIUM or not DRIVER:
        pytest.skip("no chromium with chromedriver is installed")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


def opened(browser: Any, folder: Path, text: str, size: tuple[int, int]) -> None:
    (folder / "report.html").write_text(text, encoding="utf-8")
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get((folder / "report.html").as_uri())
    if shots := os.environ.get("SCREENSHOTS"):
        browser.save_screenshot(f"{shots}/{folder.name}-{size[0]}.png")
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0], "no sideways scrolling"


def column(browser: Any, index: int, table: str = "series") -> list[str]:
    script = f"return [...document.getElementById('{table}').tBodies[0].rows].filter(r => !r.hidden)"
    texts: list[str] = browser.execute_script(f"{script}.map(r => r.cells[{index}].textContent)")
    return texts


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_study_in_a_browser(browser: Any, tmp_path: Path, size: tuple[int, int]) -> None:
    records = importing.read(Path(__file__).parents[1] / "sweep/studies/published/checkpointing_8b.csv")
    opened(browser, tmp_path, page("study", records), size)
    buttons = browser.find_elements("css selector", "#series th button")
    largest = [button.text for button in buttons].index("largest batch that fits, per device")
    assert column(browser, largest) == ["2", "12", "13"]
    buttons[largest].click()
    assert column(browser, largest) == ["2", "12", "13"], "as numbers, not as text"
    buttons[largest].click()
    assert column(browser, largest) == ["13", "12", "2"]
    browser.find_element("css selector", "input[data-for=series]").send_keys("13 OOM")
    assert column(browser, largest) == ["12"]
    charts = browser.find_elements("css selector", "figure svg")
    assert len(charts) == 10
    assert all(chart.size["width"] > 0.8 * min(size[0], 450) and chart.size["height"] > 60 for chart in charts)
    titles = browser.execute_script("return [...document.querySelectorAll('use > title')].map(t => t.textContent)")
    assert "checkpointing, expandable segments, batch size 14: 17.14 s per iteration, too slow to use" in titles
    mark = browser.execute_script(
        "const mark = document.querySelector('figure use > title').parentElement;"
        "mark.scrollIntoView({block: 'center'}); mark.dispatchEvent(new MouseEvent('click', {bubbles: true}));"
        "return document.getElementById('tip').textContent"
    )
    assert re.search(r"batch size \d+: [\d.]+ GiB", mark)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_large_grid_with_failures_in_a_browser(browser: Any, tmp_path: Path, size: tuple[int, int]) -> None:
    failure = Failure(kind="Error", message="<script>alert('x')</script> " + "long" * 60)
    records = [
        *grid(CUDA),
        cell(spec(model=replace(LLAMA, name="<b>" + "name-" * 20), seq_len=64), Status.FAILED, failure=failure),
    ]
    opened(browser, tmp_path, page("a & <b>", records), size)
    assert browser.title == "a & <b>"
    assert len(column(browser, 0)) == 17
    assert "alert" in browser.find_element("id", "failures").text


def test_the_page_is_alone_in_the_world() -> None:
    text = page("study", study())
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert "@import" not in text
    assert "http-equiv" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert wanted <= set(ids)


SHAPES: dict[str, list[CellRecord]] = {
    "nothing fits": [out_of_memory(spec(device=VIRTUAL), Phase.LOAD)],
    "only a crash": [cell(spec(), Status.FAILED, reason="no")],
    "virtual": study(VIRTUAL),
    "one point": list(walk({1: (10, 20, 1.0)}, world_size=1)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_page(shape: str) -> None:
    text = page("x", SHAPES[shape])
    assert text.count("<figure") == text.count("<svg")
    assert ("virtual: time not measured" in text) == (SHAPES[shape][0].spec.device == VIRTUAL)
    assert (VIRTUAL_SENTENCE[1:] in text.replace("&#39;", "'")) == (SHAPES[shape][0].spec.device == VIRTUAL)
