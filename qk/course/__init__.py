"""What the notebooks show, and how they check answers: `from qk import course`."""

from qk.course import charts, exercises, figures, trace
from qk.course.charts import *  # noqa: F403
from qk.course.exercises import *  # noqa: F403
from qk.course.figures import *  # noqa: F403
from qk.course.trace import *  # noqa: F403
from qk.course.windows import OutOfBounds  # noqa: F401

__all__ = sorted(["OutOfBounds", *charts.__all__, *exercises.__all__, *figures.__all__, *trace.__all__])
