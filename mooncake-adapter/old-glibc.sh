#!/usr/bin/env bash
# Makes what links programs against an old C library, so that the wheel's work on distributions older than this one:
# old-glibc.sh VERSION DIR leaves DIR/cc, a linker for cargo. VERSION is 2.28, say. Asks nothing; does nothing when all
# is there.
#
# Zig has the symbols of each version of glibc, and makes libraries that define them and do nothing. The linker stays
# this machine's: Zig's has no --exclude-libs, and without it the libraries would export what they link.
set -euo pipefail
version="$1"
mkdir -p "$2"
dir="$(realpath "$2")"
zig='ziglang>=0.15,<1'

[ -x "$dir/cc" ] && exit 0
machine="$(uname -m)"
python3 -m venv "$dir/python"
"$dir/python/bin/pip" install --quiet --disable-pip-version-check "$zig"
echo 'int main(void) { return 0; }' >"$dir/empty.c"
# Zig makes the libraries on the way to any program, and leaves them in its cache.
ZIG_GLOBAL_CACHE_DIR="$dir/cache" "$dir/python/bin/python" -m ziglang cc \
    -target "$machine-linux-gnu.$version" "$dir/empty.c" -o "$dir/empty"
mkdir -p "$dir/lib"
find "$dir/cache/o" \( -name 'lib*.so.*' -o -name libc_nonshared.a \) -exec cp {} "$dir/lib" \;
loader="$(basename "$(find "$dir/cache/o" -name 'libld.so.*')")"
# What `-lc` finds, as glibc has it: some functions, such as stat, were never in the shared library.
echo "GROUP($dir/lib/libc.so.6 $dir/lib/libc_nonshared.a AS_NEEDED($dir/lib/$loader))" >"$dir/lib/libc.so"
for library in dl m pthread resolv rt util; do
    ln -sf "$(basename "$dir/lib/lib$library.so."*)" "$dir/lib/lib$library.so"
done
rm -r "$dir/cache" "$dir/python" "$dir/empty" "$dir/empty.c"
# This machine's libgcc_s needs its own C library; the one that the program will find does not.
printf '#!/bin/sh\nexec cc -Wl,--allow-shlib-undefined -L "%s" "$@"\n' "$dir/lib" >"$dir/cc.new"
chmod +x "$dir/cc.new"
mv "$dir/cc.new" "$dir/cc"
