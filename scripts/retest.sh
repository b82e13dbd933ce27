#!/bin/sh
# retest.sh BIN: run the tests again that failed in the last run of pytest, if they are few, and name those that pass now.
# A test that fails beside others and passes alone depends on the speed or the state of the machine. That is a defect to
# repair, not a reason to throw away a whole CI run; many failures, or none to be found, are.
set -eu
bin=$1
most=5
failed=$("$bin/python" - <<'PYTHON'
import json, pathlib
cache = pathlib.Path(".pytest_cache/v/cache/lastfailed")
print("\n".join(json.loads(cache.read_text())) if cache.exists() else "", end="")
PYTHON
)
count=$(printf '%s' "$failed" | grep -c . || true)
if [ "$count" -eq 0 ] || [ "$count" -gt "$most" ]; then
    echo "error: $count tests are known to have failed; only 1 to $most of them are run again" >&2
    exit 1
fi
echo "==> run again, alone: "
printf '%s\n' "$failed"
"$bin/python" -m pytest --last-failed --last-failed-no-failures none
echo "==> FLAKY: these failed first and passed alone; each is a defect to repair:"
printf '%s\n' "$failed"
