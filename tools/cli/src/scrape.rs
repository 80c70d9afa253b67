//! Reads the metrics that a process on the network exports.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(3);

/// Longest text that is read. The rest is left out.
const BYTES_MAX: u64 = 16 << 20;

/// Returns `/metrics` of a server, or why there is none.
pub(crate) fn metrics(address: SocketAddr) -> Result<String, String> {
    let get = || {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut text = String::new();
        stream.take(BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = get().map_err(|error: io::Error| format!("{address}: {error}"))?;
    Ok(text.split_once("\r\n\r\n").map_or(text.clone(), |(_, body)| body.to_owned()))
}

/// Finds the address of `HOST:PORT` or `http://HOST:PORT`, perhaps with a path.
pub(crate) fn address(named: &str) -> Result<SocketAddr, String> {
    let place = named.strip_prefix("http://").unwrap_or(named);
    let place = place.split('/').next().unwrap_or_default();
    let mut found = place.to_socket_addrs().map_err(|cause| format!("{named}: {cause}"))?;
    found.next().ok_or_else(|| format!("{named} has no address"))
}
