//! The connection to a coordinator: its address, certificates and timeout.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use laxity_cli::output::{self, say};
use laxity_credentials::explain;
use laxity_credentials::{Certificates, private_key};
use laxity_wire::v1::operator_client::OperatorClient;
use serde::Serialize;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Response, Status};

use super::error::{ClusterError, SETTINGS};

const ENDPOINT_ENV: &str = "LAXITY_COORDINATOR";
/// The endpoint of a coordinator with the default configuration.
const ENDPOINT_DEFAULT: &str = "http://127.0.0.1:7471";
/// Longest answer in bytes. A thousand batches with long host names fit.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Where the coordinator is, and how it identifies this program.
#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    /// URL of the coordinator; it begins with https:// if the coordinator uses TLS
    #[arg(long, value_name = "URL", env = ENDPOINT_ENV, default_value = ENDPOINT_DEFAULT)]
    endpoint: String,
    /// How long to wait for an answer, in milliseconds
    #[arg(
        long, value_name = "MS", default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) timeout_ms: u64,
    /// Certificate of the authority that signed the coordinator's certificate (PEM)
    #[arg(long, value_name = "FILE", env = "LAXITY_CA", help_heading = "TLS")]
    ca: Option<PathBuf>,
    /// Certificate of this client, with the role viewer or operator (PEM)
    #[arg(long, value_name = "FILE", env = "LAXITY_CERT", requires = "key", help_heading = "TLS")]
    cert: Option<PathBuf>,
    /// Private key of --cert (PEM)
    #[arg(long, value_name = "FILE", env = "LAXITY_KEY", requires = "cert", help_heading = "TLS")]
    key: Option<PathBuf>,
    /// Name in the coordinator's certificate, if it differs from the endpoint (behind a tunnel,
    /// say)
    #[arg(long, value_name = "NAME", help_heading = "TLS")]
    server_name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl CoordinatorArgs {
    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// Returns the endpoint's URL. An empty variable counts as unset.
    fn url(&self) -> &str {
        match self.endpoint.as_str() {
            "" => ENDPOINT_DEFAULT,
            url => url,
        }
    }

    fn endpoint(&self) -> Result<Endpoint, ClusterError> {
        let wrong = || ClusterError::NotAnEndpoint(self.endpoint.clone());
        let url = self.url().to_owned();
        let endpoint = Endpoint::from_shared(url).map_err(|_| wrong())?;
        let uri = endpoint.uri();
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        if uri.host().is_none() {
            return Err(wrong());
        }
        let endpoint = endpoint
            .connect_timeout(self.timeout())
            .http2_keep_alive_interval(Duration::from_secs(20))
            .keep_alive_while_idle(true);
        if tls {
            let tls = self.tls()?;
            // The error's own text says only `transport error`, so its cause is shown.
            let unusable = |error| explain::cause(&error, &SETTINGS).text;
            return endpoint
                .tls_config(tls)
                .map_err(|error| ClusterError::Certificates(unusable(error)));
        }
        if given(&self.ca).is_some() || given(&self.cert).is_some() {
            return Err(ClusterError::PlainWithCertificates);
        }
        Ok(endpoint)
    }

    fn tls(&self) -> Result<ClientTlsConfig, ClusterError> {
        let ca = given(&self.ca).ok_or(ClusterError::NoAuthority)?;
        let ca = Certificates::read(SETTINGS.ca, ca)?;
        ca.roots()?;
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.pem));
        if let (Some(cert), Some(path)) = (given(&self.cert), given(&self.key)) {
            let cert = Certificates::read(SETTINGS.cert, cert)?;
            let key = laxity_credentials::read(SETTINGS.key, path)?;
            private_key(SETTINGS.key, path, &key)?;
            tls = tls.identity(Identity::from_pem(cert.pem, key));
        }
        if let Some(name) = &self.server_name {
            tls = tls.domain_name(name);
        }
        Ok(tls)
    }

    pub(crate) fn run<T, W>(&self, work: impl FnOnce(ClusterClient) -> W) -> Result<T, ClusterError>
    where
        W: Future<Output = Result<T, ClusterError>>,
    {
        let endpoint = self.endpoint()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ClusterError::Runtime)?;
        runtime.block_on(async {
            let channel = endpoint.connect().await.map_err(|error| self.unreachable(&error))?;
            let operator = OperatorClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
            work(ClusterClient { operator, timeout: self.timeout() }).await
        })
    }

    /// Connects to the coordinator, and returns its answer to `question`, which has to end within
    /// the timeout.
    pub(crate) fn ask<T>(
        &self,
        question: impl AsyncFnOnce(&mut OperatorClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Result<T, ClusterError> {
        self.run(async |client| client.answer(question(&mut client.operator.clone())).await)
    }

    /// Prints an answer as JSON, or as the text for people.
    pub(crate) fn tell(
        &self,
        told: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), ClusterError> {
        Ok(say(if self.json { output::json(told)? } else { text() })?)
    }

    fn unreachable(&self, error: &tonic::transport::Error) -> ClusterError {
        let cause = explain::cause(error, &SETTINGS);
        let hint = match (cause.hint, self.url().starts_with("https:")) {
            (Some(hint), _) => hint,
            (None, true) => {
                "does laxity-coordinator run there, and does it serve with TLS? (--endpoint, \
                 $LAXITY_COORDINATOR)"
                    .into()
            }
            (None, false) => format!(
                "does laxity-coordinator run there (systemctl status laxity-coordinator), and is \
                 the endpoint right? One that serves with TLS wants https:// (--endpoint, \
                 ${ENDPOINT_ENV})"
            ),
        };
        ClusterError::Unreachable { url: self.url().to_owned(), cause: cause.text, hint }
    }
}

fn given(path: &Option<PathBuf>) -> Option<&Path> {
    path.as_deref().filter(|path| !path.as_os_str().is_empty())
}

pub(crate) struct ClusterClient {
    pub(crate) operator: OperatorClient<Channel>,
    timeout: Duration,
}

impl ClusterClient {
    /// Returns the answer, or an error if it does not come in time.
    pub(crate) async fn answer<T>(
        &self,
        asked: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClusterError> {
        match tokio::time::timeout(self.timeout, asked).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(ClusterError::answered(&status)),
            Err(_) => Err(ClusterError::Late(self.timeout)),
        }
    }
}
