"""`python -m memtune` is the command `memtune`."""

from memtune.cli import main

if __name__ == "__main__":
    main()
