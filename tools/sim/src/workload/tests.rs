//! Tests of whole workloads: properties of generators, contents of real traces, and readers that
//! must not panic on any file.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

type Reader = fn(&Path) -> Result<Requests, WorkloadError>;

/// Returns requests of these seconds, tokens and block ids. A block has 16 tokens.
pub(super) fn requests<'a>(list: impl IntoIterator<Item = (u64, u32, &'a [u32])>) -> Requests {
    let mut requests = Requests { block_tokens: 16, ..Requests::default() };
    for (at_s, prompt_tokens, blocks) in list {
        requests.list.push(Request {
            arrival: Time(at_s * 1_000_000_000),
            prompt_tokens,
            output_tokens: 2,
            first_block: requests.blocks.len() as u32,
            blocks: blocks.len() as u32,
        });
        requests.blocks.extend(blocks);
    }
    requests.distinct_blocks = requests.blocks.iter().max().map_or(0, |id| id + 1);
    requests
}

pub(super) fn reading(reader: Reader, content: &[u8]) -> Result<Requests, WorkloadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    std::fs::write(&path, content).unwrap();
    reader(&path)
}

pub(super) fn message(reader: Reader, content: &[u8]) -> String {
    reading(reader, content).unwrap_err().to_string()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

pub(super) fn mooncake(path: &Path) -> Result<Requests, WorkloadError> {
    jsonl::read(path, &jsonl::MOONCAKE)
}

pub(super) fn qwen(path: &Path) -> Result<Requests, WorkloadError> {
    jsonl::read(path, &jsonl::QWEN)
}

pub(super) fn azure(path: &Path) -> Result<Requests, WorkloadError> {
    csv::read(path, &csv::AZURE)
}

pub(super) fn burstgpt(path: &Path) -> Result<Requests, WorkloadError> {
    csv::read(path, &csv::BURSTGPT)
}

const READERS: [Reader; 4] = [mooncake, qwen, azure, burstgpt];

const MOONCAKE: &str = concat!(
    r#"{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}"#,
    "\n",
    r#"{"timestamp": 500, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 3, 4]}"#,
    "\n",
    r#"{"timestamp": 1000, "input_length": 512, "output_length": 5, "hash_ids": [9]}"#,
    "\n",
);

const QWEN: &str = concat!(
    r#"{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "#,
    r#""output_length": 132, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}"#,
    "\n",
    r#"{"chat_id": 2, "parent_chat_id": 1, "timestamp": 2.75, "input_length": 64, "#,
    r#""output_length": 20, "type": "text", "turn": 2, "hash_ids": [7, 8, 11, 9]}"#,
    "\n",
);

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                     2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n";

const BURSTGPT: &str = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                        5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n";

const FILES: [&str; 4] = [MOONCAKE, QWEN, AZURE, BURSTGPT];

fn made(source: Source, requests: f64, seconds: f64) -> (Workload, f64) {
    let workload = Workload { source, seconds, ..Workload::default() };
    (workload, requests / seconds)
}

/// Asserts the invariants of every workload.
fn assert_sound(requests: &Requests) {
    assert!(requests.list.is_sorted_by_key(|r| r.arrival));
    let mut end = 0;
    let mut parents = vec![None; requests.distinct_blocks as usize];
    let mut appeared = 0;
    for request in &requests.list {
        assert_eq!(request.first_block, end);
        end += request.blocks;
        assert!(request.prompt_tokens > 0 && request.output_tokens > 0);
        let all = request.prompt_tokens.div_ceil(requests.block_tokens);
        assert!(request.blocks == all || requests.blocks.is_empty());
        let mut before = u32::MAX;
        for &block in requests.blocks_of(request) {
            assert!(block <= appeared, "ids are numbered as they appear");
            appeared = appeared.max(block + 1);
            let parent = *parents[block as usize].get_or_insert(before);
            assert_eq!(parent, before, "an id stands for its whole prefix");
            before = block;
        }
    }
    assert_eq!(end as usize, requests.blocks.len());
    assert_eq!(appeared, requests.distinct_blocks);
}

#[test]
fn files_are_read_gzipped_or_not_and_in_several_members() {
    for (reader, text) in READERS.into_iter().zip(FILES) {
        let plain = reading(reader, text.as_bytes()).unwrap();
        assert_sound(&plain);
        assert_eq!(reading(reader, &gzip(text.as_bytes())).unwrap(), plain);
        let (start, end) = text.as_bytes().split_at(text.len() / 2);
        let members = [gzip(start), gzip(end)].concat();
        assert_eq!(reading(reader, &members).unwrap(), plain);
        // Line ends of Windows.
        let text = text.replace('\n', "\r\n");
        assert_eq!(reading(reader, text.as_bytes()).unwrap(), plain);
    }
}

/// A few kilobytes of gzip can unpack to an endless line.
#[test]
fn a_file_without_an_end_is_refused_before_it_fills_memory() {
    let zeros = vec![b'7'; 1 << 20];
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    for _ in 0..256 {
        encoder.write_all(&zeros).unwrap();
    }
    let packed = encoder.finish().unwrap();
    for reader in READERS {
        let found = message(reader, &packed);
        assert!(found.contains("longer than"), "{found}");
        let device = reader(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(device.contains("it is a device"), "{device}");
    }
}

#[test]
fn files_that_are_none_are_refused_with_a_reason() {
    for (reader, text) in READERS.into_iter().zip(FILES) {
        assert!(message(reader, b"").ends_with("holds no request"));
        assert!(message(reader, &gzip(b"")).ends_with("holds no request"));
        let mut packed = gzip(text.as_bytes());
        let size = packed.len();
        // The checksum is in the last 8 bytes.
        packed[size - 8] ^= 0x55;
        let damaged = message(reader, &packed);
        assert!(damaged.contains("its gzip data is damaged"), "{damaged}");
        packed.truncate(size - 12);
        let early = message(reader, &packed);
        assert!(early.contains("its gzip data ends early"), "{early}");
        let missing = reader(Path::new("/nowhere/trace.jsonl")).unwrap_err();
        let missing = missing.to_string();
        assert!(missing.starts_with("cannot read /nowhere/trace.jsonl: "), "{missing}");
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(reader(folder.path()), Err(WorkloadError::Read { .. })));
        let latin: Vec<u8> = [text.as_bytes(), b"\xe9\xe8,1,\xe9,1,1,1\n"].concat();
        let latin = message(reader, &latin);
        let lines = text.lines().count();
        assert!(latin.contains(&format!("line {}: ", lines + 1)), "{latin}");
    }
    let no_rows = AZURE.lines().next().unwrap();
    assert!(message(azure, no_rows.as_bytes()).ends_with("holds no request"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_change_to_a_file_makes_a_reader_panic(
        format in 0..4_usize,
        zipped in any::<bool>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..6_u8, any::<u8>()), 1..6),
    ) {
        const PIECES: [&str; 12] = [
            "-", "1e999", "\"", "[", "{", "\n", ",", "null", "99999999999999999999", "é", "\0", ".",
        ];
        let mut bytes = FILES[format].as_bytes().to_vec();
        if zipped {
            bytes = gzip(&bytes);
        }
        for (place, kind, byte) in edits {
            let at = place.index(bytes.len().max(1));
            match kind {
                0 => bytes.truncate(at),
                1 => { bytes.splice(at..at, [byte]); }
                2 if at < bytes.len() => bytes[at] = byte,
                3 if at < bytes.len() => { bytes.remove(at); }
                _ => {
                    let piece = PIECES[byte as usize % PIECES.len()];
                    bytes.splice(at..at, piece.bytes());
                }
            }
        }
        match reading(READERS[format], &bytes) {
            Ok(requests) => assert_sound(&requests),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn any_setting_gives_a_sound_workload(
        source in 0..6_usize,
        arrivals in 0..3_usize,
        seed in any::<u64>(),
        scale in 0.01..20.0_f64,
        longest in 1..200_000_u32,
        seconds in 0.01..300.0_f64,
        burstiness in 0.0..20.0_f64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        std::fs::write(&path, if source == 4 { MOONCAKE } else { AZURE }).unwrap();
        let workload = Workload {
            source: [
                Source::Conversation,
                Source::Agent,
                Source::LongConversation,
                Source::LongAgent,
                Source::Mooncake,
                Source::Azure,
            ][source],
            file: Some(path),
            arrivals: [Arrivals::Poisson, Arrivals::Bursty, Arrivals::Recorded][arrivals],
            burstiness,
            seconds,
            length_scale: scale,
            longest,
            ..Workload::default()
        };
        match load(&workload, 200.0 / seconds, seed) {
            Ok(requests) => {
                assert_sound(&requests);
                prop_assert!(requests.list.iter().all(|r| r.prompt_tokens <= longest));
                let last = requests.list.last().unwrap().arrival;
                prop_assert!((last.0 as f64) < seconds * 1e9);
            }
            Err(error) => prop_assert!(matches!(error, WorkloadError::TooFew { .. }), "{}", error),
        }
    }
}

#[test]
fn generators_have_the_mean_and_the_reuse_of_the_paper() {
    // Mean, reuse, and the least ratio of the 99th percentile to the mean.
    for (source, mean, reuse, tail) in [
        (Source::Conversation, 2000.0, 0.50, 6.0),
        (Source::Agent, 1000.0, 0.65, 4.0),
        (Source::LongConversation, 15_000.0, 0.40, 5.5),
        (Source::LongAgent, 9000.0, 0.65, 3.5),
    ] {
        for seed in 0..5 {
            let (workload, rate) = made(source, 20_000.0, 60.0);
            let requests = load(&workload, rate, seed).unwrap();
            let summary = Summary::of(&requests);
            println!("{source:?}, seed {seed}: {summary:?}");
            assert!((summary.prompt_mean / mean - 1.0).abs() < 0.06, "{summary:?}");
            assert!((summary.reuse - reuse).abs() < 0.025, "{summary:?}");
            let found = f64::from(summary.prompt_p99) / summary.prompt_mean;
            assert!(found > tail, "{found} {summary:?}");
            assert!(summary.hottest_tenth > 0.6, "{summary:?}");
            assert!((summary.rate / rate - 1.0).abs() < 0.03, "{summary:?}");
            assert!((summary.gap_variation - 1.0).abs() < 0.05, "{summary:?}");
        }
    }
}

/// Returns the mean prompt of the first and of the last tenth of the requests, over several seeds.
fn ends_of(source: Source) -> (f64, f64) {
    let (mut first, mut last) = (0.0, 0.0);
    for seed in 0..8 {
        let (workload, rate) = made(source, 20_000.0, 60.0);
        let requests = load(&workload, rate, seed).unwrap();
        let mean = |list: &[Request]| {
            let sum: f64 = list.iter().map(|r| f64::from(r.prompt_tokens)).sum();
            sum / list.len() as f64
        };
        let tenth = requests.list.len() / 10;
        first += mean(&requests.list[..tenth]) / 8.0;
        last += mean(&requests.list[requests.list.len() - tenth..]) / 8.0;
    }
    (first, last)
}

#[test]
fn sessions_are_in_full_swing_from_the_start() {
    // If all sessions began at 0, the first tenth would have few later turns, which are longer.
    for source in [Source::Conversation, Source::LongConversation, Source::LongAgent] {
        let (first, last) = ends_of(source);
        assert!((first / last - 1.0).abs() < 0.1, "{source:?}: {first} {last}");
    }
}

#[test]
fn agents_reuse_prefixes_that_many_share() {
    let (workload, rate) = made(Source::Agent, 20_000.0, 60.0);
    let requests = load(&workload, rate, 1).unwrap();
    // The first block identifies the template.
    let mut uses = vec![0_u32; requests.distinct_blocks as usize];
    for request in &requests.list {
        uses[requests.blocks_of(request)[0] as usize] += 1;
    }
    uses.sort_unstable_by(|a, b| b.cmp(a));
    let total = requests.list.len() as f64;
    let share = |count: usize| f64::from(uses[..count].iter().sum::<u32>()) / total;
    assert!((0.13..0.2).contains(&share(1)), "{}", share(1));
    assert!((0.45..0.6).contains(&share(10)), "{}", share(10));
}

#[test]
fn the_same_seed_gives_the_same_requests_and_another_one_others() {
    for source in [Source::Conversation, Source::LongAgent] {
        let (workload, rate) = made(source, 500.0, 10.0);
        let requests = load(&workload, rate, 7).unwrap();
        assert_sound(&requests);
        assert_eq!(load(&workload, rate, 7).unwrap(), requests);
        assert_ne!(load(&workload, rate, 8).unwrap(), requests);
    }
}

#[test]
fn how_arrivals_are_spaced_leaves_prompts_as_they_are() {
    let (mut workload, rate) = made(Source::Agent, 2000.0, 10.0);
    let poisson = load(&workload, rate, 7).unwrap();
    workload.arrivals = Arrivals::Recorded;
    let recorded = load(&workload, rate, 7).unwrap();
    assert_eq!(recorded.list.len(), 2000);
    assert!((Summary::of(&recorded).rate / rate - 1.0).abs() < 0.001);
    let lengths = |requests: &Requests| {
        let first = requests.list[..1800].iter();
        first.map(|r| r.prompt_tokens).collect::<Vec<_>>()
    };
    assert_eq!(lengths(&poisson), lengths(&recorded));
    assert_eq!(poisson.blocks[..10_000], recorded.blocks[..10_000]);
}

#[test]
fn lengths_are_scaled_and_reuse_stays() {
    for source in [Source::Conversation, Source::LongAgent] {
        let (mut workload, rate) = made(source, 5000.0, 60.0);
        let one = Summary::of(&load(&workload, rate, 3).unwrap());
        workload.length_scale = 4.0;
        workload.longest = u32::MAX;
        let four = Summary::of(&load(&workload, rate, 3).unwrap());
        assert!((four.prompt_mean / one.prompt_mean - 4.0).abs() < 0.05);
        assert!((four.reuse - one.reuse).abs() < 0.04, "{one:?} {four:?}");
        assert!((four.output_mean - one.output_mean).abs() < 1.0);
    }
}

#[test]
fn a_trace_is_played_again_with_other_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    std::fs::write(&path, MOONCAKE).unwrap();
    let mut workload = Workload {
        source: Source::Mooncake,
        file: Some(path),
        seconds: 10.0,
        ..Workload::default()
    };
    let once = Summary::of(&mooncake(workload.file.as_deref().unwrap()).unwrap());
    for arrivals in [Arrivals::Poisson, Arrivals::Bursty, Arrivals::Recorded] {
        workload.arrivals = arrivals;
        let requests = load(&workload, 300.0, 1).unwrap();
        assert_sound(&requests);
        let summary = Summary::of(&requests);
        assert!((2700..3300).contains(&summary.requests), "{summary:?}");
        assert!((summary.reuse - once.reuse).abs() < 0.001, "{summary:?}");
    }
}

#[test]
fn too_few_and_too_many_requests_are_refused() {
    let (good, _) = made(Source::Agent, 100.0, 1.0);
    let message = |rate| load(&good, rate, 0).unwrap_err().to_string();
    assert!(message(1e-6).starts_with("no request arrives in 1 s at 0.000001"));
    assert!(message(1e8).starts_with("the workload has more than 20000000 requests"));
}

/// Returns a trace of the folder `LAXITY_DATA`, if the variable is set.
fn real(name: &str) -> Option<PathBuf> {
    Some(laxity_tests::recorded_data()?.join("traces").join(name))
}

#[test]
fn the_published_mooncake_trace_is_read_whole() {
    let Some(path) = real("mooncake_conversation.jsonl.gz") else { return };
    let requests = mooncake(&path).unwrap();
    assert_sound(&requests);
    let summary = Summary::of(&requests);
    println!("{summary:?}");
    assert_eq!(summary.requests, 12_031);
    assert_eq!(summary.distinct_blocks, 182_790);
    assert_eq!(summary.prompt_longest, 126_195);
    assert!((summary.prompt_mean - 12_035.06).abs() < 0.01);
    assert!((summary.reuse - 0.3736).abs() < 0.0001);
    // With half the length, half a block of reuse is lost where two prompts diverge, and half of
    // the block that all share.
    let half = lengths::scaled(requests, 0.5, u32::MAX).unwrap();
    assert_sound(&half);
    let half = Summary::of(&half);
    println!("{half:?}");
    assert!((half.prompt_mean - 6017.7).abs() < 0.5);
    assert!((half.reuse - 0.340).abs() < 0.001);
}

#[test]
fn the_published_azure_trace_is_read_whole() {
    let Some(path) = real("azure_llm_2023_code.csv.gz") else { return };
    let requests = azure(&path).unwrap();
    assert_sound(&requests);
    let summary = Summary::of(&requests);
    println!("{summary:?}");
    assert_eq!(summary.requests, 8819);
    assert!((summary.prompt_mean - 2047.85).abs() < 0.01);
    assert_eq!(summary.prompt_longest, 7437);
    assert_eq!(summary.reuse, 0.0);
}
