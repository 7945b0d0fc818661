#!/usr/bin/env bash
# grain 0.2.18: the DataLoader gives each rank an equal number of rows also with drop_remainder=False,
# which asks that the first ranks get the rows that are left over: these ranks' last rows are not
# read. Of 7 rows on 4 ranks 4 are read. Over several epochs the ranks with fewer rows go on into an
# epoch more, so that some rows come more often than others. drop_remainder=True warns of what it
# drops; this says nothing. MapDataset's slices by rank lose none.
#
# Seen on 2026-11-30 (grain 0.2.18, numpy 2.4.6, Python 3.11), 4 ranks, no shuffling:
#   7 rows, 1 epoch: ranks read [[0], [2], [4], [6]]
#   23 rows, epochs 1: less than 1 times [5, 11, 17]; more than 1 times []
#   23 rows, epochs 4: less than 4 times [5, 11, 17]; more than 4 times [18, 19, 20]
#   23 rows in slices of a MapDataset: less than 1 times []; more than 1 times []
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
cd "$folder"
cat > run.py <<'PYTHON'
import sys
from collections import Counter

import grain

RANKS = 4


def read(rows, epochs):
    """Return the rows that the DataLoaders of all ranks read, by rank."""
    everyone = []
    for rank in range(RANKS):
        sampler = grain.samplers.IndexSampler(
            num_records=rows,
            num_epochs=epochs,
            shard_options=grain.sharding.ShardOptions(rank, RANKS, drop_remainder=False),
        )
        loader = grain.DataLoader(data_source=range(rows), sampler=sampler, worker_count=0)
        everyone.append([int(row) for row in loader])
    return everyone


def uneven(everyone, rows, epochs):
    """Return the rows that come less often than once an epoch, and those that come more often."""
    times = Counter(row for some in everyone for row in some)
    less = [row for row in range(rows) if times[row] < epochs]
    more = [row for row in range(rows) if times[row] > epochs]
    print(f"less than {epochs} times {less}; more than {epochs} times {more}")
    return bool(less), bool(more)


few = read(7, 1)
print("7 rows, 1 epoch: ranks read", few)
seen = [few]
for epochs in (1, 4):
    print(f"23 rows, epochs {epochs}: ", end="")
    seen.append(uneven(read(23, epochs), 23, epochs))
documents = grain.MapDataset.range(23)
slices = [list(documents[rank::RANKS]) for rank in range(RANKS)]
print("23 rows in slices of a MapDataset: ", end="")
seen.append(uneven(slices, 23, 1))
if seen != [[[0], [2], [4], [6]], (True, False), (True, True), (False, False)]:
    sys.exit("grain has changed: with drop_remainder=False its DataLoader reads other rows")
PYTHON
venv/bin/python -W ignore run.py 2> errors || { cat errors; exit 1; }
