"""`python -m noloco_mega COMMAND`."""

from noloco_mega.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
