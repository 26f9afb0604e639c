"""``medfed predict`` from a clone, without installing: see medfed/commands/predict.py."""

from medfed.commands.predict import main

if __name__ == "__main__":
    main()
