"""Make `python -m memtune` the command `memtune`."""

from memtune.cli import main

if __name__ == "__main__":
    main()
