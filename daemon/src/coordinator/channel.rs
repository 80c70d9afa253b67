//! How a coordinator is reached. The one place that knows about transports: TLS belongs into [`endpoint`], with the
//! certificates of the configuration, and nothing else has to change.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

/// How long a connection may take to be made.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// What is connected to.
///
/// # Errors
/// It is no URL; text for the log.
pub fn endpoint(url: &str) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|error| format!("`{url}` is no endpoint: {error}"))?;
    // Reports are small and wanted at once.
    Ok(endpoint.tcp_nodelay(true).connect_timeout(CONNECT_MAX))
}

/// Connects.
///
/// # Errors
/// Text for the log: what the network said.
pub async fn connect(url: &str) -> Result<Channel, String> {
    let connecting = endpoint(url)?;
    match tokio::time::timeout(CONNECT_MAX, connecting.connect()).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => {
            // The cause is the news: "transport error" alone says nothing.
            let mut text = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                text = error.to_string();
                cause = error.source();
            }
            Err(format!("cannot connect to {url}: {text}"))
        }
        Err(_) => Err(format!("{url} does not answer within {CONNECT_MAX:?}")),
    }
}
