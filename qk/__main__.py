"""The command line of the package: python -m qk COMMAND."""

import importlib
import sys

COMMANDS = {
    "copy": ("qk.tools.copy", "copy a kernel into a file of your own project"),
    "bench": ("qk.tools.bench.__main__", "time the kernels on this GPU, next to PyTorch and other libraries"),
    "aot": (
        "qk.tools.aot.__main__",
        "compile every kernel for every GPU, without needing one; show registers",
    ),
    "export": ("qk.course.export", "write one notebook that carries the package, for Colab and Kaggle"),
    "site": ("qk.course.site", "write the notebooks as web pages, with sliders that work without Python"),
    "lm": ("qk.tools.lm", "make the course's language model: extract its text, train it, quantize it"),
    "data": ("qk.data.__main__", "rebuild the weights that the notebooks use, and compare them with the shipped file"),
}


def _help():
    commands = "\n".join(f"  {name:8}{text}" for name, (_, text) in COMMANDS.items())
    return f"usage: python -m qk COMMAND ...\n\n{commands}\n\npython -m qk COMMAND --help shows its options."


def main(argv=None):
    """Run a command. Returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        print(f"there is no command {name!r}\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[name][0])
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("qk"):
            raise
        print(f"python -m qk {name}: {error}", file=sys.stderr)
        return 1
    return module.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
