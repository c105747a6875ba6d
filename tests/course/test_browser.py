"""What a learner does: JupyterLab in a browser, run all, move every slider and see its figure change.
And what a reader without Python does: the same on a page of the site, whose sliders move without a kernel.

`pytest -m browser` runs it; without the mark it is skipped, for, expected minutes. It wants Chromium or Chrome, and the
extra `browser`. QK_SCREENSHOTS=folder keeps pictures of each cell that has sliders, before and after each move.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
import tiny
from exercises import code_cells, needed

from qk.course import site as course_site

pytestmark = pytest.mark.browser

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
BROWSERS = "chromium", "chromium-browser", "google-chrome"
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL = ".jp-Notebook .jp-CodeCell"
# JupyterLab's settings: cells out of sight stay in the page, nothing asks for news
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
# the state of a figure: its pixels. Of the widgets: one for each thing a learner can move
IMAGES = ".jp-OutputArea-output img"
FIGURES = f"cell => [...cell.querySelectorAll('{IMAGES}')].map(image => image.src).join()"
CONTROLS = ".widget-slider, .widget-dropdown"
ERRORS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"
# a cell that is folded shows no number
DONE = f"""() => [...document.querySelectorAll('{CELL}')].every(
    cell => cell.querySelector('.jp-InputPlaceholder')
    || /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent))"""


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.fail("playwright is missing: pip install -e '.[browser]'")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not program:
        pytest.fail(f"no browser: install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser):
    """What keeps JupyterLab's files from one page to the next."""
    with browser.new_context(viewport={"width": 1280, "height": 1000}) as context:
        yield context


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab with this Python, in an empty folder, with default settings. -> the folder, its address"""
    root, state = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyter")
    for name, text in SETTINGS.items():
        file = state / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    folders = {f"JUPYTER_{kind}_DIR": str(state / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {f"JUPYTERLAB_{kind}_DIR": str(state / kind.lower()) for kind in ("SETTINGS", "WORKSPACES")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": root, "disable_check_xsrf": True}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--IdentityProvider.token="]
    command += [f"--ServerApp.{name}={value}" for name, value in options.items()]
    url = f"http://127.0.0.1:{port}"
    with open(state / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | folders, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not answers(f"{url}/api"):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"JupyterLab doesn't start:\n{(state / 'log').read_text()}")
            time.sleep(0.3)
        yield root, url
    finally:
        server.terminate()
        server.wait(30)


def sliders(notebook):
    """[(a code cell with widgets, how many sliders it says it has), ...]"""
    return [
        (cell, len(output.data["text/plain"].split(": ")[1].split(", ")))
        for cell in code_cells(notebook)
        for output in cell.outputs
        if WIDGET in output.get("data", {})
    ]


def keep(locator, name):
    folder = os.environ.get("QK_SCREENSHOTS")
    if folder:
        locator.screenshot(path=Path(folder) / f"{name}.png")


def move(page, control):
    """Moves a slider or a dropdown by one step, with the keyboard."""
    target = control.locator(".noUi-handle, select").first
    target.focus()
    if target.evaluate("it => it.tagName") == "SELECT":
        last = target.evaluate("it => it.selectedIndex == it.length - 1")
        target.select_option(index=target.evaluate("it => it.selectedIndex") + (-1 if last else 1))
    else:
        last = float(target.get_attribute("aria-valuenow")) >= float(target.get_attribute("aria-valuemax"))
        page.keyboard.press("ArrowLeft" if last else "ArrowRight")


@pytest.mark.parametrize("name", NAMES)
def test_sliders_change_their_figures(context, lab, name):
    """Of a notebook with many sliders, run what they build on: that every cell runs is shown by nbval."""
    root, url = lab
    notebook = nbformat.read(FOLDER / name, as_version=4)
    found = sliders(notebook)
    if len(found) > 1:
        kept = [id(cell) for cell in needed(code_cells(notebook), [cell for cell, _ in found])]
        notebook.cells = [cell for cell in notebook.cells if cell.cell_type != "code" or id(cell) in kept]
    places = [id(cell) for cell in code_cells(notebook)]
    expected = {places.index(id(cell)): count for cell, count in found}
    # without outputs: what is seen below was drawn below
    for cell in code_cells(notebook):
        cell.update(outputs=[], execution_count=None)
    nbformat.write(notebook, root / name)

    page = context.new_page()
    page.goto(f"{url}/lab/tree/{name}?reset")
    page.wait_for_selector(CELL, timeout=90_000)
    # before the kernel is there, "Run All Cells" runs nothing
    idle = page.locator(".jp-StatusBar-TextItem", has_text="Idle")
    idle.wait_for(timeout=90_000)
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()
    page.wait_for_function(DONE, polling=500, timeout=300_000)
    idle.wait_for(timeout=300_000)  # folded cells may still run

    cells = page.locator(CELL)
    assert page.locator(ERRORS).all_inner_texts() == []
    for number, count in expected.items():
        cell = cells.nth(number)
        # a widget appears a moment after its cell has run, and its figure after it
        cell.locator(CONTROLS).nth(count - 1).wait_for(timeout=20_000)
        cell.locator(IMAGES).first.wait_for(timeout=20_000)
        controls = cell.locator(CONTROLS).all()
        assert len(controls) == count
        cell.scroll_into_view_if_needed()
        keep(cell, f"{Path(name).stem}_{number:02}")
        for turn, control in enumerate(controls):
            before, label = cell.evaluate(FIGURES), control.inner_text().split("\n")[0]
            assert before, f"code cell {number + 1} has sliders, and no figure"
            move(page, control)
            deadline = time.monotonic() + 30
            while (after := cell.evaluate(FIGURES)) == before and time.monotonic() < deadline:
                page.wait_for_timeout(100)
            assert after != before, f"code cell {number + 1}: the figure doesn't follow {label!r}"
            assert after.count("data:image/png") == before.count("data:image/png")
            keep(cell, f"{Path(name).stem}_{number:02}_move{turn + 1}")
    assert len(page.locator(CONTROLS).all()) == sum(expected.values())
    assert page.locator(ERRORS).all_inner_texts() == []
    page.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of one small notebook, away from it."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site") / "pages"
    cells = [tiny.code(tiny.SETUP), tiny.sliders(tiny.FEW), tiny.sliders(tiny.MANY)]
    nbformat.write(tiny.notebook(*cells), source / "tiny.ipynb")
    assert course_site.main(["-o", str(folder), str(source / "tiny.ipynb")]) == 0
    return folder


@pytest.fixture(params=["light", "dark"])
def reader(browser, site, request):
    """The site's index, opened from its folder; nothing may go wrong on a page, or be asked of another place."""
    wrong = []
    page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme=request.param)
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda failed: wrong.append(failed.url))
    page.on("request", lambda sent: sent.url.startswith((site.as_uri(), "data:")) or wrong.append(sent.url))
    page.goto((site / "index.html").as_uri())
    yield page, request.param
    page.close()
    assert wrong == []


def seen(page, image):
    """An image's pixels, once it is loaded."""
    loaded = "image => image.complete && image.naturalWidth > 1 && image.decode().then(() => true)"
    page.wait_for_function(loaded, arg=image.element_handle(), timeout=10_000)
    return image.screenshot()


def test_a_page_s_sliders_change_its_pictures(reader):
    page, scheme = reader
    colors = page.evaluate("[getComputedStyle(document.body)].flatMap(style => [style.color, style.backgroundColor])")
    ink, paper = (sum(map(int, re.findall(r"\d+", color))) for color in colors)
    assert (ink < paper) == (scheme == "light")
    keep(page, f"site_index_{scheme}")
    page.locator("h3 a").click()
    boxes = page.locator(".sliders").all()
    assert [box.locator("input, select").count() for box in boxes] == [2, 3]
    for number, box in enumerate(boxes):
        image, before = box.locator("img"), []
        for turn, control in enumerate(box.locator("input, select").all()):
            before.append(seen(page, image))
            if control.evaluate("it => it.tagName") == "SELECT":
                control.select_option(index=0)
            else:
                control.focus()
                page.keyboard.press("ArrowLeft" if control.evaluate("it => it.value == it.max") else "ArrowRight")
            assert seen(page, image) not in before, f"the figure doesn't follow slider {turn + 1}"
        keep(box, f"site_{number}_{scheme}")
    # the first of three went back as the third was moved
    places = boxes[1].locator("output").all_inner_texts()
    assert places == ["3", "5", "4"]


def test_a_page_without_javascript_shows_its_figures(browser, site):
    page = browser.new_page(java_script_enabled=False)
    page.goto((site / "tiny.html").as_uri())
    page.wait_for_load_state()
    assert page.locator(".sliders img").count() == 2 and page.locator("input, select").count() == 0
    assert page.locator("noscript").first.inner_text() == "The sliders need JavaScript."
    page.close()
