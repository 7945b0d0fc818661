#!/usr/bin/env bash
# DeepSeek-V3's chat template, as trl 1.16.0 ships it, writes the second call of a conversation
# without the assistant's header and without <｜tool▁calls▁begin｜>: a flag that the first call sets
# stays set. The first result has <｜tool▁outputs▁begin｜>, the second has not. A model that is
# trained on such conversations learns to call a tool right behind the user's words, and only there.
#
# Seen on 2026-11-29 (jinja2 3.1.6, Python 3.11):
#   first call:  <｜User｜>q1<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function...
#   second call: <｜User｜>q2\n<｜tool▁call▁begin｜>function...
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps jinja2==3.1.6 markupsafe==3.0.3
"$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" trl==1.16.0
"$folder/venv/bin/python" - "$folder"/trl-*.whl <<'PYTHON'
import sys
import zipfile

from jinja2.sandbox import ImmutableSandboxedEnvironment

source = zipfile.ZipFile(sys.argv[1]).read("trl/chat_templates/deepseekv3.jinja").decode()
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)


def turn(number):
    function = {"name": "f", "arguments": "{}"}
    call = {"type": "function", "function": function}
    return [
        {"role": "user", "content": f"q{number}"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": f"r{number}"},
        {"role": "assistant", "content": f"a{number}"},
    ]


text = environment.from_string(source).render(
    messages=turn(1) + turn(2), bos_token="", eos_token="", add_generation_prompt=False
)
first, second = (text.split(f"q{number}")[1].split(f"r{number}")[0] for number in (1, 2))
print("first call: ", repr(first))
print("second call:", repr(second))
marks = ("<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁outputs▁begin｜>")
seen = [[mark in each for mark in marks] for each in (first, second)]
if seen != [[True] * 3, [False] * 3]:
    sys.exit("the template has changed: each call has its header now, or none has")
PYTHON
