#!/bin/sh
# retest.sh BIN: runs the tests that failed in the last runs of pytest again, one after the other, if there are at most five.
# A test that fails among others and passes alone depends on the speed or the state of the machine. That is a defect to fix,
# but it does not fail the CI run. More failures do, and so does a failed run without a recorded failure.
set -eu
bin=$1
most=5
# pytest-xdist appends the group of a test to its id (`...::test_name@docker`).
failed=$("$bin/python" - <<'PYTHON'
import json, pathlib, re
cache = pathlib.Path(".pytest_cache/v/cache/lastfailed")
failed = json.loads(cache.read_text()) if cache.exists() else {}
print("\n".join(sorted({re.sub(r"@[a-z_]+$", "", id) for id in failed})), end="")
PYTHON
)
count=$(printf '%s' "$failed" | grep -c '' || true)
if [ "$count" -eq 0 ] || [ "$count" -gt "$most" ]; then
    echo "error: $count tests are recorded as failed; only 1 to $most are run again" >&2
    exit 1
fi
echo "==> FLAKY if they pass now, alone; each is a defect to fix:"
printf '%s\n' "$failed"
printf '%s\n' "$failed" | tr '\n' '\0' | xargs -0 "$bin/python" -m pytest
