"""Write src/gradwire/models/gennorm_tables.npz: for each numbered format and each β of the grid, the best
step in units of E|x| and the integer masses of the cells. Run it only to add a format or change the wire
version: the tables are part of the wire format, and tests/models/test_gennorm.py holds their checksum.

    python scripts/make_gennorm_tables.py
"""

from pathlib import Path

import numpy as np

from gradwire.models import gennorm_cells, gennorm_moments
from gradwire.small_float_formats import PRESETS

PATH = Path(__file__).parent.parent / "src/gradwire/models/gennorm_tables.npz"


def main() -> None:
    tables = {}
    for fmt in dict.fromkeys(PRESETS.values()):
        steps = [gennorm_cells.best_step(fmt, float(b)) for b in gennorm_moments.BETAS]
        tables[f"{fmt}_step"] = np.array(
            [s / gennorm_moments.mean_abs(float(b)) for s, b in zip(steps, gennorm_moments.BETAS, strict=True)]
        )
        tables[f"{fmt}_masses"] = np.stack(
            [gennorm_cells.integer_masses(fmt, float(b), s) for b, s in zip(gennorm_moments.BETAS, steps, strict=True)]
        )
        print(f"{fmt}: {tables[f'{fmt}_masses'].shape}")
    np.savez_compressed(PATH, **tables)
    print(f"{PATH}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
