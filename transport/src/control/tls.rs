//! TLS as links use it: version 1.3, ring, our own verifiers. Both sides check
//! the other's certificate against the job's authority and nothing else (SEC-1).
//! There is no session resumption: every connection is verified in full.

use std::{sync::Arc, time::Duration};

use quinn::{
    IdleTimeout, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig,
    SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{NoServerSessionStorage, danger::ClientCertVerified, danger::ClientCertVerifier},
    version::TLS13,
};

use super::{
    Options,
    certs::{CertError, Fingerprint, Subject, crypto},
    identity::Identity,
    lane,
};

/// Protocol of links between members.
pub(super) const ALPN_PEER: &[u8] = b"elastic-peer/1";
/// Protocol of a newcomer that has only the token.
pub(super) const ALPN_JOIN: &[u8] = b"elastic-join/1";
/// What dialling asks for by name; nobody looks at it.
pub(super) const SERVER_NAME: &str = "elastic";

/// Checks that `authority` signed `certificate`, and reads whom it speaks for.
pub(super) fn verify(
    certificate: &CertificateDer<'_>,
    authority: &CertificateDer<'_>,
    now: UnixTime,
) -> Result<Subject, CertError> {
    let parsed =
        webpki::EndEntityCert::try_from(certificate).map_err(crypto("read the certificate"))?;
    let anchor = webpki::anchor_from_trusted_cert(authority)
        .map_err(crypto("read the authority's certificate"))?;
    let algorithms = provider().signature_verification_algorithms.all;
    // Every node is both server and client; the certificate carries both usages.
    let usage = webpki::KeyUsage::server_auth();
    parsed
        .verify_for_usage(algorithms, &[anchor], &[], now, usage, None, None)
        .map_err(|error| CertError::Unsigned(error.to_string()))?;
    Subject::of(certificate)
}

/// Accepts both protocols. A certificate is asked for and, where one is shown,
/// verified; that a peer link has one is checked after the handshake, because
/// joiners have none yet.
pub(super) fn server(
    identity: &Identity,
    options: &Options,
) -> Result<quinn::ServerConfig, CertError> {
    let mut tls = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(crypto("set up TLS"))?
        .with_client_cert_verifier(Verifier::of_job(identity))
        .with_single_cert(identity.chain(), identity.private_key())
        .map_err(crypto("set up TLS"))?;
    tls.alpn_protocols = vec![ALPN_PEER.to_vec(), ALPN_JOIN.to_vec()];
    tls.session_storage = Arc::new(NoServerSessionStorage {});
    tls.send_tls13_tickets = 0;
    let quic = QuicServerConfig::try_from(tls).map_err(crypto("set up QUIC"))?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(quic));
    // Strangers hold at most this much before the handshake.
    config.max_incoming(256).incoming_buffer_size_total(8 << 20);
    config.transport_config(transport(options, STRANGER_WINDOW));
    Ok(config)
}

/// Dials members.
pub(super) fn peer_client(
    identity: &Identity,
    options: &Options,
) -> Result<quinn::ClientConfig, CertError> {
    let tls = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(crypto("set up TLS"))?
        .dangerous()
        .with_custom_certificate_verifier(Verifier::of_job(identity))
        .with_client_auth_cert(identity.chain(), identity.private_key())
        .map_err(crypto("set up TLS"))?;
    client(tls, ALPN_PEER, options)
}

/// Dials without a certificate. Without a pin any server passes here: it then has
/// to prove over the channel that it knows the token.
pub(super) fn stranger_client(
    pin: Option<Fingerprint>,
    protocol: &[u8],
    options: &Options,
) -> Result<quinn::ClientConfig, CertError> {
    let trust = pin.map_or(Trust::Anybody, Trust::Pinned);
    let tls = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(crypto("set up TLS"))?
        .dangerous()
        .with_custom_certificate_verifier(Verifier::new(trust))
        .with_no_client_auth();
    client(tls, protocol, options)
}

/// The authority's certificate that a node showed after its own.
pub(super) fn shown(connection: &quinn::Connection) -> Option<Vec<CertificateDer<'static>>> {
    let identity = connection.peer_identity()?;
    identity.downcast::<Vec<CertificateDer<'static>>>().ok().map(|chain| *chain)
}

fn client(
    mut tls: ClientConfig,
    protocol: &[u8],
    options: &Options,
) -> Result<quinn::ClientConfig, CertError> {
    tls.alpn_protocols = vec![protocol.to_vec()];
    tls.resumption = Resumption::disabled();
    tls.enable_sni = false;
    let quic = QuicClientConfig::try_from(tls).map_err(crypto("set up QUIC"))?;
    let mut config = quinn::ClientConfig::new(Arc::new(quic));
    config.transport_config(transport(options, LINK_WINDOW));
    Ok(config)
}

/// What one stream may have under way. It is also what may lie ahead of a beat in
/// sockets and queues: on two busy cores 8 MiB delayed beats by 44 ms (p50), 2 MiB
/// by 3 ms, at no loss of bandwidth up to 200 MiB/s times 10 ms.
const STREAM_WINDOW: u32 = 2 << 20;
/// All streams together, and room: no stream can use up what another needs. The
/// sender's buffer too, else beats would wait for bulk to be acknowledged.
const LINK_WINDOW: u32 = STREAM_WINDOW * (lane::Lane::ALL.len() as u32 + 1);
/// What a dialler may send before it has proved anything.
const STRANGER_WINDOW: u32 = 64 << 10;

/// Lifts the limits for strangers: this connection is a link now.
pub(super) fn trust(connection: &quinn::Connection) {
    connection.set_receive_window(VarInt::from_u32(LINK_WINDOW));
    connection.set_max_concurrent_uni_streams(VarInt::from_u32(lane::Lane::ALL.len() as u32));
}

fn transport(options: &Options, window: u32) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(window))
        .send_window(u64::from(LINK_WINDOW))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .datagram_receive_buffer_size(None)
        // Dialling a process that is just starting: ask again after 150 ms, 300 ms …
        // and not only after a second.
        .initial_rtt(Duration::from_millis(50))
        .keep_alive_interval(Some(options.keep_alive))
        .max_idle_timeout(idle(options.idle));
    Arc::new(config)
}

fn idle(limit: Duration) -> Option<IdleTimeout> {
    IdleTimeout::try_from(limit).ok()
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Whose certificates are believed.
#[derive(Debug)]
enum Trust {
    /// Those of this authority. What they say is for the link to hold against what it
    /// expects, where a refusal can be explained to both sides.
    Authority(CertificateDer<'static>),
    /// Those of the authority with this fingerprint, which the peer shows.
    Pinned(Fingerprint),
    /// Any: what is believed is proved over the channel.
    Anybody,
}

#[derive(Debug)]
struct Verifier {
    trust: Trust,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(trust: Trust) -> Arc<Self> {
        Arc::new(Self { trust, provider: provider() })
    }

    fn of_job(identity: &Identity) -> Arc<Self> {
        Self::new(Trust::Authority(identity.authority.clone()))
    }

    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = match &self.trust {
            Trust::Authority(authority) => authority,
            Trust::Pinned(pin) => {
                others.iter().find(|other| Fingerprint::of(other) == *pin).ok_or(unknown)?
            }
            Trust::Anybody => return Ok(()),
        };
        verify(certificate, authority, now).map(drop).map_err(refused)
    }
}

fn refused(error: CertError) -> rustls::Error {
    rustls::Error::InvalidCertificate(match error {
        CertError::Unsigned(_) => CertificateError::UnknownIssuer,
        _ => CertificateError::BadEncoding,
    })
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(end_entity, intermediates, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(end_entity, intermediates, now).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        ServerCertVerifier::verify_tls12_signature(self, message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        ServerCertVerifier::verify_tls13_signature(self, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ServerCertVerifier::supported_verify_schemes(self)
    }
}
