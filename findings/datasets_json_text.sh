#!/usr/bin/env bash
# datasets 5.2.0 reads a column whose records hold texts and lists as JSON. A text that is itself JSON
# comes back as an object: a tool's result {"a": 1} is no text any more, neither in the rows nor in the
# Parquet file that `to_parquet` writes, while another text of the same column stays one. A chat
# template writes the object in another way than the text, or refuses it.
#
# Seen on 2026-11-29 (pyarrow 26.0.1, Python 3.11):
#   rows:    [{'a': 1}, 'plain', [{'type': 'text', 'text': 'x'}]]
#   Parquet: ['{"a": 1}', '"plain"', '[{"type":"text","text":"x"}]']
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import datasets
import pyarrow.parquet as pq

datasets.disable_progress_bars()
texts = ['{"a": 1}', "plain", [{"type": "text", "text": "x"}]]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps({"content": text}) + "\n" for text in texts)
read = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
rows = [row["content"] for row in read]
read.to_parquet("rows.parquet")
stored = pq.read_table("rows.parquet")["content"].to_pylist()
print("rows:   ", rows)
print("Parquet:", stored)
if rows != [{"a": 1}, *texts[1:]] or stored[:2] != ['{"a": 1}', '"plain"']:
    sys.exit("datasets has changed: a text that is JSON stays a text, or nothing is JSON")
PYTHON
