//! Strangers that speak QUIC: with the wrong certificate, the wrong protocol or
//! the wrong words.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use quinn::{Connection, Endpoint, crypto::rustls::QuicClientConfig};
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustls::{
    DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
};
use tokio::time::timeout;
use transport::control::PROTOCOL;

use super::{HOLD, Kind};

const PEER: &[u8] = b"elastic-peer/1";
const JOIN: &[u8] = b"elastic-join/1";
const OTHER: &[u8] = b"h3";

/// Longer than a node waits for a request.
const LONG: Duration = Duration::from_secs(3);

/// An endpoint that speaks with every node and means none of it.
#[derive(Debug)]
pub struct Stranger {
    endpoint: Endpoint,
    foreign: Papers,
    expired: Papers,
    replay: Vec<u8>,
}

#[derive(Debug)]
struct Papers {
    certificate: CertificateDer<'static>,
    key: Vec<u8>,
}

impl Stranger {
    /// A stranger that has seen `replay`, the bytes of somebody's join.
    ///
    /// # Panics
    /// When this machine has no free port.
    #[must_use]
    pub fn new(replay: Vec<u8>) -> Self {
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let endpoint = Endpoint::client(local).expect("a port");
        Self { endpoint, foreign: Papers::new(2999), expired: Papers::new(2001), replay }
    }

    pub(super) async fn knock(&self, kind: Kind, door: SocketAddr) {
        let (protocol, papers) = match kind {
            Kind::OtherProtocol => (OTHER, None),
            Kind::NoCertificate => (PEER, None),
            Kind::ForeignCertificate => (PEER, Some(&self.foreign)),
            Kind::ExpiredCertificate => (PEER, Some(&self.expired)),
            _ => (JOIN, None),
        };
        let Ok(connecting) = self.endpoint.connect_with(config(protocol, papers), door, "elastic")
        else {
            return;
        };
        let Ok(Ok(connection)) = timeout(HOLD, connecting).await else { return };
        let wait = if kind == Kind::SlowJoin { LONG } else { HOLD / 5 };
        let _ = timeout(wait, self.speak(kind, &connection)).await;
        connection.close(0_u32.into(), b"");
    }

    /// Says what this kind says, and waits to be shown out.
    async fn speak(&self, kind: Kind, connection: &Connection) -> Option<()> {
        let (mut send, mut receive) = connection.open_bi().await.ok()?;
        let mut request = (4000_u32).to_le_bytes().to_vec();
        request.extend(PROTOCOL.to_le_bytes());
        let bytes = match kind {
            Kind::HugeLength => [&u32::MAX.to_le_bytes()[..], &PROTOCOL.to_le_bytes()].concat(),
            Kind::SlowJoin => request,
            Kind::ReplayedJoin => self.replay.clone(),
            _ => {
                request.resize(4004, 0x55);
                request
            }
        };
        send.write_all(&bytes).await.ok()?;
        let _ = receive.read(&mut [0; 64]).await;
        connection.closed().await;
        Some(())
    }
}

/// Lets a newcomer ask to join here and gives the bytes of its request: what
/// somebody on the way could record.
///
/// # Panics
/// When nobody asks within the limit.
pub async fn record(asks: impl FnOnce(SocketAddr), limit: Duration) -> Vec<u8> {
    let papers = Papers::new(2999);
    let mut tls = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![papers.certificate.clone()], papers.key())
        .expect("a certificate");
    tls.alpn_protocols = vec![JOIN.to_vec()];
    let quic = quinn::crypto::rustls::QuicServerConfig::try_from(tls).expect("QUIC");
    let config = quinn::ServerConfig::with_crypto(Arc::new(quic));
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let endpoint = Endpoint::server(config, local).expect("a port");
    asks(endpoint.local_addr().expect("an address"));
    let heard = async {
        let connection = endpoint.accept().await?.accept().ok()?.await.ok()?;
        let (_send, mut receive) = connection.accept_bi().await.ok()?;
        let mut length = [0; 4];
        receive.read_exact(&mut length).await.ok()?;
        let mut rest = vec![0; u32::from_le_bytes(length).min(1 << 16) as usize];
        receive.read_exact(&mut rest).await.ok()?;
        Some([&length[..], &rest].concat())
    };
    timeout(limit, heard).await.ok().flatten().expect("somebody asks to join")
}

impl Papers {
    /// A certificate of nobody's authority that ends with a year.
    fn new(year: i32) -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        let name = "elastic://00000000-0000-0000-0000-000000000001/n9/\
                    00000000-0000-0000-0000-000000000002";
        let name = name.try_into().expect("a name");
        params.subject_alt_names = vec![rcgen::SanType::URI(name)];
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let certificate = params.self_signed(&key).expect("a certificate").der().clone();
        Self { certificate, key: key.serialize_der() }
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone().into())
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn config(protocol: &[u8], papers: Option<&Papers>) -> quinn::ClientConfig {
    let tls = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody));
    let mut tls = match papers {
        None => tls.with_no_client_auth(),
        Some(papers) => tls
            .with_client_auth_cert(vec![papers.certificate.clone()], papers.key())
            .expect("a certificate"),
    };
    tls.alpn_protocols = vec![protocol.to_vec()];
    tls.enable_sni = false;
    quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("QUIC")))
}

/// Believes every server: a stranger does not care to whom it speaks.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
