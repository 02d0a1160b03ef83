"""Eight readers while two writers publish, one of which is killed again and again; it ends with an
error where any answer is not right.

    python scripts/soak_store.py --minutes 10 [--out FOLDER]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from soak import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, help="an empty folder, such as one of a network disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(soak(options.out or Path(folder) / "results", 60 * options.minutes)))


if __name__ == "__main__":
    main()
