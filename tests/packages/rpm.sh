#!/bin/bash
# What an administrator does with the RPMs. rpm has a database of its own here, where no package provides what they
# require, so rpm checks no dependencies; this script reads them. Ends with a line "passed".
set -eEuo pipefail
cd /packages
. ./operator.sh

# Debian's rpm refuses to install packages without this option, because apt would not know them.
rpms() { rpm --force-debian --nodeps --dbpath /var/lib/rpm "$@" >>install.log 2>&1; }
query() { rpm --dbpath /var/lib/rpm "$@"; }
all=(laxity laxity-coordinator laxity-lab laxity-devel laxity-debuginfo)
conf=/etc/laxity/laxityd.toml
# Enterprise distributions search it.
echo /usr/lib64 >/etc/ld.so.conf.d/lib64.conf

rpms --install ./old/*.rpm
is_installed_safely
query --verify --nodeps "${all[@]}"
[ "$(query --query --list laxity-debuginfo | grep -c 'build-id/../.*\.debug$')" -ge 10 ]
for needed in $(query --query --requires laxity | sed -n 's/^\(lib[^(]*\).*/\1/p' | sort -u); do
    ldconfig -p | grep -q "$needed" || { echo "laxity needs $needed, which Debian does not have"; false; }
done
found="$(find /etc /usr /run /var/lib -xdev -name '*laxity*' -not -path '/run/*' -not -path '*.wants/*')"
for file in $found /etc/laxity /usr/share/doc/laxity /usr/include/laxity.h; do
    [ "$file" = /var/lib/laxity ] || query --query --file "$file" >/dev/null || { echo "nobody owns $file"; false; }
done
echo "installed: it runs, delays nothing, and the packages own their files"

echo "# edited" >>"$conf"
laxity enforce on
# The first word differs in packages of an earlier commit.
ordered="enforce (.*; the configuration has observe)"
mode_is "$ordered"
# Packages of an earlier commit may not have the job.
if ! laxity example-job --help >/dev/null 2>&1; then
    mkdir unpacked
    rpm2cpio ./new/laxity-[0-9]*.rpm | (cd unpacked && cpio -id --quiet)
    example=/packages/unpacked/usr/bin/laxity
fi
load_begins
was="$(pid)"
rpms --upgrade ./new/*.rpm
[ "$(query --query --queryformat '%{VERSION}' laxity)" != 0.0.1 ]
[ "$(pid)" != "$was" ]
mode_is "$ordered"
load_ends 1
tail -n 1 "$conf" | grep -qx "# edited"
for unit in laxityd laxity-coordinator; do systemctl is-enabled --quiet "$unit"; done
echo "upgraded: it was restarted and took over a job, and what was commanded or edited holds"

rpms --erase "${all[@]}"
[ "$(pid)" = 0 ]
grep -qx "# edited" "$conf.rpmsave"
getent passwd laxity >/dev/null
[ "$(cat /var/lib/laxity/mode)" != "" ]
left="$(find /etc /usr /var/lib /var/cache -xdev -path '*laxity*')"
[ "$left" = "/etc/laxity
$conf.rpmsave
/var/lib/laxity
/var/lib/laxity/mode" ] || { echo "left: $left"; false; }
for unit in laxityd laxity-coordinator; do
    [ "$(systemctl show --property LoadState --value "$unit")" = not-found ]
done
echo "erased: the edited configuration, the user and what was commanded stay, and nothing else"
echo passed
