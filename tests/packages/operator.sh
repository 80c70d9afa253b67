# What all checks in this folder do on a machine that has just booted. They begin by `. ./operator.sh`.
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
failed() { # failed LINE
    echo "failed in line $1"
    tail -n 30 install.log load 2>&1
    journalctl --no-pager -n 200 -u 'laxity*' | grep -v "Unknown key" | tail -n 30
}
trap 'failed $LINENO' ERR

sees() { # sees PATTERN COMMAND…: prints the first lines with the pattern that the command prints, within 5 s
    for _ in {1..50}; do
        if "${@:2}" 2>&1 | grep "$1"; then return; fi
        sleep 0.1
    done
    "${@:2}"
    false
}
mode_is() { sees "policy laxity, $1" laxity status; }
pid() { systemctl show --property MainPID --value laxityd; }

# What holds after an installation, before anybody has configured anything.
is_installed_safely() {
    local unit library
    for unit in laxityd laxity-coordinator; do
        systemctl is-active --quiet "$unit"
        systemctl is-enabled --quiet "$unit"
    done
    mode_is observe
    laxity doctor >doctor
    grep -q '^ok *library' doctor
    laxity run -- bash -c 'grep -q liblaxity.so /proc/self/maps'
    [ "$(stat -c %U:%a /run/laxity)" = laxity:755 ]
    for library in libnccl-net-laxity.so liblaxity_client.so.0; do
        ldconfig -p | grep "$library" >/dev/null
    done
}

# A job that sends, until load_ends. `laxity`, or the program that $example names, has it.
load_begins() {
    laxity run --require --name load -- "${example:-laxity}" example-job --seconds 600 >load 2>&1 &
    load=$!
    sees " load .* egress: window" laxity top --once --size 120 24
}
load_ends() { # load_ends TIMES: it is good that every byte was scheduled and arrived, under so many further daemons
    kill -TERM "$load"
    wait "$load"
    tail -n +2 load
    grep -q "Daemons that took over: $1, " load
}
