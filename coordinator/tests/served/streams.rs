//! Tests of a daemon's stream: orders, compatibility, and hostile daemons.

use std::time::{Duration, Instant};

use laxity_coordinator::config::Config;
use laxity_coordinator::limits::Limits;
use laxity_wire::v1::{
    BatchFinished, Epoch, Event, GoodbyeReason, Heartbeat, Nack, NackReason, event::Event as Kind,
    from_coordinator::Message, from_daemon,
};
use tonic::transport::Endpoint;

use crate::daemon::{Daemon, Served, arrived, hello, in_time};
use crate::support::batch;

fn finished(batch: u64) -> Kind {
    Kind::BatchFinished(BatchFinished { batch })
}

#[tokio::test]
async fn a_full_order_answers_the_snapshot_and_deltas_follow() {
    let served = Served::start(Config::default()).await;
    let mut daemon = served.daemon("a").await;
    let welcome = daemon.next().await.expect("an answer");
    assert!(
        matches!(&welcome, Message::Welcome(w) if w.term == 7 && w.heartbeat_ns > 0),
        "{welcome:?}"
    );
    let standing = daemon.next().await.expect("an answer");
    assert!(matches!(&standing, Message::Standing(s) if !s.drained), "{standing:?}");
    daemon.snapshot(vec![arrived(1, 900), arrived(2, 500)]).await;
    let full = daemon.settled().await;
    assert_eq!((full.base, full.considered_report), (None, 1));
    assert_eq!(daemon.served(), [2, 1]);
    daemon.report(vec![arrived(3, 100)]).await;
    let delta = daemon.settled().await;
    assert_eq!(delta.base, full.epoch);
    assert_eq!(delta.ranks.len(), 1, "only what is new: {delta:?}");
    assert_eq!(daemon.served(), [3, 2, 1]);
    daemon.report(vec![finished(2)]).await;
    daemon.settled().await;
    assert_eq!(daemon.served(), [3, 1]);
}

#[tokio::test]
async fn a_daemon_with_more_events_than_are_allowed_is_read_later() {
    let limits = Limits { events_per_s_max: 100, ..Limits::default() };
    let served = Served::start(Config { limits, ..Config::default() }).await;
    let mut daemon = served.settled("a", Vec::new()).await;
    let begun = Instant::now();
    for first in [0, 100] {
        daemon.report((first..first + 100).map(|batch| arrived(batch, 900)).collect()).await;
        daemon.settled().await;
    }
    daemon.report(vec![finished(1)]).await;
    daemon.settled().await;
    // 200 events at 100/s, of which half a second's worth comes at once.
    assert!(begun.elapsed() > Duration::from_millis(900), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_daemon_that_lost_track_gets_everything_again_and_acks_are_seen() {
    let served = Served::start(Config::default()).await;
    let mut daemon = served.settled("a", vec![arrived(1, 900)]).await;
    daemon.resync().await;
    let full = daemon.order().await;
    assert_eq!((full.base, full.ranks.len()), (None, 1));
    daemon
        .say(from_daemon::Message::Nack(Nack {
            epoch: Some(Epoch { term: 1, sequence: 1 }),
            reason: NackReason::WrongBase as i32,
            detail: String::new(),
        }))
        .await;
    assert_eq!(daemon.order().await.base, None);
    daemon.ack().await;
    let acked = async {
        loop {
            let hosts = served.hosts().await;
            if hosts.hosts[0].applied == daemon.applied {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    in_time(acked, "the ack is seen").await;
}

#[tokio::test]
async fn releases_that_overlap_understand_each_other_and_others_part_politely() {
    let served = Served::start(Config::default()).await;
    // A later release has protocols, capabilities and events that this coordinator lacks.
    let mut new = hello("new");
    (new.protocol, new.protocol_min) = (99, 1);
    new.capabilities.push(1000);
    let mut new = served.attend(new).await;
    new.snapshot(vec![arrived(3, 900)]).await;
    new.settled().await;
    let odd = laxity_wire::v1::Report {
        sequence: new.reported() + 1,
        snapshot: 0,
        events: vec![Event { event: None }],
    };
    new.say(from_daemon::Message::Report(odd)).await;
    new.resync().await;
    assert_eq!(new.order().await.ranks.len(), 1, "the stream goes on");
    // These releases have no protocol in common with this one.
    for (newest, oldest) in [(99, 98), (0, 0)] {
        let mut alien = hello("alien");
        (alien.protocol, alien.protocol_min) = (newest, oldest);
        let mut alien = served.attend(alien).await;
        let last = alien.goodbye().await;
        assert_eq!(last.reason(), GoodbyeReason::Incompatible);
        assert!(last.detail.contains(&format!("{oldest} to {newest}")), "{}", last.detail);
    }
}

#[tokio::test]
async fn a_second_stream_of_a_host_replaces_the_first_and_stopping_says_so() {
    let served = Served::start(Config::default()).await;
    // A stream that was replaced ends at a report, and also at a heartbeat.
    for (host, message) in [("a", Some(Heartbeat {})), ("b", None)] {
        let mut first = served.settled(host, Vec::new()).await;
        served.settled(host, vec![arrived(1, 100)]).await;
        match message {
            Some(heartbeat) => first.say(from_daemon::Message::Heartbeat(heartbeat)).await,
            None => first.report(vec![arrived(9, 1)]).await,
        }
        assert_eq!(first.goodbye().await.reason(), GoodbyeReason::Replaced);
    }
    let mut second = served.settled("c", Vec::new()).await;
    served.handle.stop();
    assert_eq!(second.goodbye().await.reason(), GoodbyeReason::Stopping);
}

#[tokio::test]
async fn messages_and_reports_beyond_their_size_end_that_stream_only() {
    let limits = Limits { message_bytes_max: 8192, events_per_report_max: 10, ..Limits::default() };
    let served = Served::limited(limits).await;
    let mut good = served.daemon("good").await;
    good.snapshot(vec![arrived(1, 900)]).await;
    let requests = |count| Vec::from_iter((0..count).map(|nth| (100 + nth, 900, 1)));
    for events in
        [(1..=11).map(finished).collect(), vec![batch(2, &requests(6)), batch(3, &requests(5))]]
    {
        let mut long = served.daemon("long").await;
        long.snapshot(events).await;
        let last = long.goodbye().await;
        assert_eq!(last.reason(), GoodbyeReason::Protocol);
        assert!(last.detail.contains("of 11 "), "{}", last.detail);
    }
    let mut large = served.daemon("large").await;
    large.snapshot((1..=1000).map(|batch| arrived(batch, 900)).collect()).await;
    let ended =
        async { while large.next().await.is_ok_and(|m| !matches!(m, Message::Goodbye(_))) {} };
    in_time(ended, "the stream is ended").await;
    good.settled().await;
    assert_eq!(good.served(), [1]);
}

#[tokio::test]
async fn connections_beyond_the_cap_are_closed_and_places_come_back() {
    let limits = Limits { connections_max: 2, ..Limits::default() };
    let served = Served::limited(limits).await;
    let _first = served.settled("a", Vec::new()).await;
    let second = served.operator().await;
    let endpoint = served.endpoint();
    let beyond = async |endpoint: Endpoint| {
        let channel = endpoint.connect().await.ok()?;
        let mut daemon = Daemon::attend(channel, hello("late")).await.ok()?;
        daemon.next().await.ok()
    };
    assert!(beyond(endpoint.clone()).await.is_none(), "no place");
    drop(second);
    let again = async {
        while beyond(endpoint.clone()).await.is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    in_time(again, "a place").await;
}

#[tokio::test]
async fn for_a_reader_that_is_slow_orders_are_merged_and_the_last_one_is_true() {
    let served = Served::start(Config::default()).await;
    let endpoint = served.endpoint();
    let narrow = endpoint.initial_stream_window_size(65_535);
    let channel = narrow.connect().await.expect("listens");
    let mut slow = Daemon::attend(channel, hello("slow")).await.expect("let in");
    let all = (1..=1000).map(|batch| arrived(batch, 60_000)).collect();
    slow.snapshot(all).await;
    slow.settled().await;
    // Each resync makes an order of 20 kB due. The daemon reads none of them.
    const ASKED: u64 = 400;
    for _ in 0..ASKED {
        slow.resync().await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    slow.report(vec![arrived(5000, 10)]).await;
    let mut orders = 0;
    let quiet = async {
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let hosts = served.hosts().await;
            let now = &hosts.hosts[0];
            if now.reports == slow.reported() && now.orders == orders {
                return;
            }
            orders = now.orders;
        }
    };
    in_time(quiet, "it stops sending").await;
    assert!(orders < ASKED / 4, "{orders} orders were made for one that does not read");
    slow.settled().await;
    assert_eq!(slow.ranks.len(), 1001);
    assert_eq!(slow.served()[0], 5000);
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() {
    let served = Served::start(Config::default()).await;
    let mut silent = tokio::net::TcpStream::connect(served.address).await.expect("listens");
    let mut byte = [0];
    let ended = async {
        // The server sends its settings first, and then closes the connection.
        while tokio::io::AsyncReadExt::read(&mut silent, &mut byte).await.is_ok_and(|read| read > 0)
        {
        }
    };
    in_time(ended, "it is closed").await;
}

#[tokio::test]
async fn one_that_reads_nothing_does_not_keep_a_coordinator_from_stopping() {
    let mut served = Served::start(Config::default()).await;
    // The window leaves no room for a byte from the coordinator.
    let deaf = served.endpoint().initial_stream_window_size(0);
    let channel = deaf.connect().await.expect("listens");
    let mut daemon = Daemon::attend(channel, hello("deaf")).await.expect("let in");
    daemon.snapshot(vec![arrived(1, 900)]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let asked = Instant::now();
    served.handle.stop();
    in_time(&mut served.running, "it stops").await.expect("no panic");
    assert!(asked.elapsed() < Duration::from_secs(15));
}

#[tokio::test]
async fn a_name_that_is_none_is_refused_whatever_its_length() {
    let served = Served::start(Config::default()).await;
    for name in ["x".repeat(100_000), "a\nb".into(), String::new()] {
        let mut odd = served.attend(hello(&name)).await;
        let last = odd.goodbye().await;
        assert_eq!(last.reason(), GoodbyeReason::Protocol);
        assert!(last.detail.contains("a host name has"), "{}", last.detail);
    }
}
