"""A notebook with sliders that runs in seconds, as a learner would have left it."""

import nbformat

WIDGET = "application/vnd.jupyter.widget-view+json"
# all white, of one pixel
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTjXzAAAAABJRU5ErkJggg=="
SETUP = """\
from qk import course
from qk.course.figures import subplots


def card(*words):
    fig, ax = subplots(2, 0.5)
    ax.set_axis_off()
    ax.text(0, 0, words)
    return fig
"""
# a slider and names to choose from; the last two sizes give the same picture
FEW = """\
def few(size=None, kind="b"):
    return card(min(size or 0, 64), kind)


course.explore(few, size=(None, 32, 64, 128), kind=("a", "b"))
"""
# 216 places
MANY = """\
def many(first=3, second=4, third_one=5):
    return card(first, second, third_one)


course.explore(many, first=range(6), second=range(6), third_one=range(6))
"""


def code(source, *outputs):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=1)


def sliders(source):
    """A cell with sliders, and what its run has left."""
    view = {WIDGET: {"model_id": "a", "version_major": 2, "version_minor": 0}, "text/plain": "Sliders: some"}
    size = {"image/png": {"width": 200, "height": 50}}
    kept = nbformat.v4.new_output("display_data", {"image/png": PNG, "text/plain": "<Figure>"}, metadata=size)
    return code(source, nbformat.v4.new_output("display_data", view), kept)


def notebook(*cells, title="# Tiny"):
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(title), *cells], metadata=metadata)
