"""What the notebooks show, and how they check answers: `from qk import course`."""

import warnings

try:
    import ipywidgets  # noqa: F401
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    message = f"qk.course needs {error.name}, which isn't installed: pip install -e '.[notebooks]'"
    raise ModuleNotFoundError(message, name=error.name) from None

from qk.course import charts, exercises, figures, trace
from qk.course import windows as launches
from qk.course.charts import *  # noqa: F403
from qk.course.exercises import *  # noqa: F403
from qk.course.figures import *  # noqa: F403
from qk.course.trace import *  # noqa: F403
from qk.course.windows import *  # noqa: F403

__all__ = sorted([*charts.__all__, *exercises.__all__, *figures.__all__, *trace.__all__, *launches.__all__])

# torch warns once, at the first backward pass on a GPU, whose thread is new. A page's output would show the warning.
warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
