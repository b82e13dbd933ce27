#!/bin/sh
# Prints the path of a Go that can build the control plane of the tests. If there is none, it downloads one from the Go
# module proxy into the cache folder and checks it against the checksum that the Go project publishes. No root is needed.
set -eu
version=1.26.8
if command -v go >/dev/null; then
    minor=$(GOTOOLCHAIN=local go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
    # From 1.21 on, Go itself downloads the newer Go that a go.mod requires.
    if [ "${minor:-0}" -ge 21 ]; then command -v go; exit 0; fi
fi
case $(uname -s)-$(uname -m) in
Linux-x86_64) at=linux-amd64 sum=ZOmGe1OnfREDMIdb1Qi4G9JSuDPBLGExZMQ4nis1RXM= ;;
Linux-aarch64) at=linux-arm64 sum=sYL/O6MqS68ML0kjsQ36WoYIpJqkw60TxizWUYUKQMc= ;;
*)
    echo "Go is missing, and this script has none for $(uname -s) on $(uname -m); next: install Go 1.26 or newer: https://go.dev/dl" >&2
    exit 1
    ;;
esac
folder=${HODEI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hodei}/go-$version
if ! [ -x "$folder/bin/go" ]; then
    echo "downloading Go $version into $folder" >&2
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
# The checksum of a Go module: a hash of the list of its files with their hashes.
lines = "".join(f"{hashlib.sha256(archive.read(file)).hexdigest()}  {file}\n" for file in names)
found = base64.b64encode(hashlib.sha256(lines.encode()).digest()).decode()
if found != wanted:
    sys.exit(f"the Go from {proxy} has the checksum {found} instead of {wanted}; next: check the proxy, GOPROXY sets it")
for file in names:
    path = os.path.join(folder, file.removeprefix(f"golang.org/toolchain@{name}/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(archive.read(file))
    if "/bin/" in file or "/pkg/tool/" in file:  # the archive does not mark programs as executable
        os.chmod(path, 0o755)
PY
    chmod 755 "$part"
    [ -x "$folder/bin/go" ] || mv "$part" "$folder" # unless another process was faster
fi
echo "$folder/bin/go"
