#!/usr/bin/env bash
# The gate as on a CI machine that knows nothing: a fresh environment with only the wheel, no variables of the user's,
# a home that is empty, and an example project outside the repository.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/wheel" "$root"
"$work/venv/bin/pip" install --quiet "$work"/wheel/nnscaler-*.whl
mkdir "$work/home" "$work/tmp"
cp -r "$root/tests/data/gate_project" "$work/project"

cd "$work/project" # "$@": more options of the gate
status=0
env -i PATH="$work/venv/bin:/usr/bin:/bin" HOME="$work/home" TMPDIR="$work/tmp" LANG=C CI=true \
    nnscaler gate --output-format full --output-format sarif=gate.sarif --output-format junit=gate.xml "$@" || status=$?
for report in gate.sarif gate.xml; do
    test -s "$report" || { echo "the gate wrote no $report" >&2; exit 1; }
done
# What is kept is in nnscaler's own cache; torch makes an (empty) one where it is imported.
left="$(find "$work/home" "$work/tmp" -mindepth 1 -not -path "$work/home/.cache" -not -path "$work/home/.cache/nnscaler*" \
    -not -path "$work/tmp/torchinductor_*")"
test -z "$left" || { echo "the gate left behind: $left" >&2; exit 1; }
exit "$status"
