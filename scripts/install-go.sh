#!/bin/sh
# Prints the path of a Go that can build the control plane of the tests. Where there is none, one is fetched from the
# Go module proxy into the cache folder, checked against the checksum that the Go project published; no root is needed.
set -eu
version=1.26.8
if command -v go >/dev/null; then
    minor=$(GOTOOLCHAIN=local go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
    # From 1.21 on, Go itself fetches the newer Go that a go.mod asks for.
    if [ "${minor:-0}" -ge 21 ]; then command -v go; exit 0; fi
fi
case $(uname -s)-$(uname -m) in
Linux-x86_64) at=linux-amd64 sum=ZOmGe1OnfREDMIdb1Qi4G9JSuDPBLGExZMQ4nis1RXM= ;;
Linux-aarch64) at=linux-arm64 sum=sYL/O6MqS68ML0kjsQ36WoYIpJqkw60TxizWUYUKQMc= ;;
*)
    echo "no Go here, and none is known for $(uname -s) on $(uname -m); next: install Go 1.26 or newer, see https://go.dev/dl" >&2
    exit 1
    ;;
esac
folder=${HODEI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hodei}/go-$version
if ! [ -x "$folder/bin/go" ]; then
    echo "fetching Go $version into $folder" >&2
    mkdir -p "$(dirname "$folder")"
    part=$(mktemp -d "$folder.part.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    "${PYTHON:-python3}" - "v0.0.1-go$version.$at" "$sum" "$part" <<'PY'
import base64, hashlib, io, os, sys, urllib.request, zipfile

name, wanted, folder = sys.argv[1:]
proxy = os.environ.get("GOPROXY", "").split(",")[0].split("|")[0]
proxy = proxy if proxy.startswith("http") else "https://proxy.golang.org"
with urllib.request.urlopen(f"{proxy}/golang.org/toolchain/@v/{name}.zip", timeout=300) as answer:
    archive = zipfile.ZipFile(io.BytesIO(answer.read()))
names = sorted(archive.namelist())
# The sum of a Go module: a hash over the list of its files with the hash of each.
lines = "".join(f"{hashlib.sha256(archive.read(file)).hexdigest()}  {file}\n" for file in names)
found = base64.b64encode(hashlib.sha256(lines.encode()).digest()).decode()
if found != wanted:
    sys.exit(f"the Go that {proxy} gave has the sum {found}, but it must be {wanted}; it is not used")
for file in names:
    path = os.path.join(folder, file.removeprefix(f"golang.org/toolchain@{name}/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(archive.read(file))
    if "/bin/" in file or "/pkg/tool/" in file:  # such archives do not say what is a program
        os.chmod(path, 0o755)
PY
    chmod 755 "$part"
    [ -x "$folder/bin/go" ] || mv "$part" "$folder" # another may have been quicker
fi
echo "$folder/bin/go"
