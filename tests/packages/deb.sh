#!/bin/bash
# What an administrator does with the packages, on a machine that has just booted. Ends with a line "passed".
set -eEuo pipefail
cd /packages
. ./operator.sh

version() { dpkg-query -W -f '${Version}' laxity; }
conf=/etc/laxity/laxityd.toml

apt-get install -y ./old/*.deb >install.log 2>&1
is_installed_safely
for file in man1/laxity.1 man5/laxityd.toml.5 man8/laxityd.8 man8/laxity-coordinator.8 man1/laxity-lab.1; do
    [ -e "/usr/share/man/$file.gz" ]
done
echo "installed: it runs, and delays nothing"

echo "# edited" >>"$conf"
laxity observe report --minutes 1 >report
laxity enforce on
systemctl reload laxityd
# The first word differs in packages of an earlier commit.
ordered="enforce (.*; the configuration has observe)"
mode_is "$ordered"

# Packages of an earlier commit may not have the job.
if ! laxity example-job --help >/dev/null 2>&1; then
    dpkg-deb -x ./new/laxity_*.deb unpacked
    example=/packages/unpacked/usr/bin/laxity
fi
load_begins
was="$(pid)"
sockets() { stat -c %i /run/laxity/laxityd.sock /run/laxity/control.sock; }
kept="$(sockets)"
apt-get install -y ./new/*.deb >>install.log 2>&1
[ "$(version)" != 0.0.1 ]
[ "$(pid)" != "$was" ]
[ "$(sockets)" = "$kept" ]
systemctl is-active --quiet laxityd
mode_is "$ordered"
load_ends 1
tail -n 1 "$conf" | grep -qx "# edited"
echo "upgraded: it was restarted, took over its sockets and a job, and what was commanded or edited holds"

apt-get remove -y 'laxity*' liblaxity-dev >>install.log 2>&1
[ ! -e /usr/sbin/laxityd ]
[ "$(pid)" = 0 ]
apt-get install -y ./new/*.deb >>install.log 2>&1
mode_is "$ordered"
tail -n 1 "$conf" | grep -qx "# edited"
echo "removed and installed again: what was commanded or edited holds"

# README's quickstart of a host.
laxity enforce off
laxity run --name example -- laxity example-job --seconds 5 >example &
job=$!
sees "> example .* MiB .*observed, never delayed" laxity top --once
sees "^example .*pid $job" laxity status
wait "$job"
sees " MiB only observed, 0 B unscheduled" cat example
sees "flows would have waited" laxity observe report
echo "as a new operator: a job is seen, and what scheduling would change"

apt-get purge -y 'laxity*' liblaxity-dev >>install.log 2>&1
systemctl daemon-reload
left="$(find /etc /usr /var/lib /var/cache /run -xdev -name '*laxity*' -not -path '/run/systemd/*')"
[ -z "$left" ] || { echo "left: $left"; false; }
if getent passwd laxity || getent group laxity; then false; fi
echo "purged: nothing is left"
echo passed
