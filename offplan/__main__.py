"""``python -m offplan``: the same as the ``offplan`` command."""

from offplan.cli import main

if __name__ == "__main__":
    main()
