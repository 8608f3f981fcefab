//! Who may speak for whom (SEC-1). One certificate authority per job; a
//! certificate names (job, node, store) in a URI and nothing else. Addresses and
//! host names are absent on purpose: identity comes from the certificate alone.
//!
//! Certificates practically never expire: the clocks of fresh machines are wrong,
//! and it is membership, not a calendar, that ends a node's right to speak (ID-2).

use std::{fmt, str::FromStr};

use job::{JobId, NodeId, StoreId};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use sha2::{Digest, Sha256};
use uuid::Uuid;

const CERTIFICATE: &str = "CERTIFICATE";
const PRIVATE_KEY: &str = "PRIVATE KEY";

/// Whom a certificate speaks for. Its text form, `elastic://job/node/store`, is
/// the certificate's only subject alternative name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subject {
    /// The job whose authority signed.
    pub job: JobId,
    /// The node.
    pub node: NodeId,
    /// The node's data directory.
    pub store: StoreId,
}

/// SHA-256 over the DER form of an authority's certificate; 64 hex digits as text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint(pub [u8; 32]);

/// The certificate authority of one job, key included.
pub struct Authority {
    pub(super) job: JobId,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate that an [`Authority`] signed, with the authority's own, in DER.
#[derive(Clone, Debug)]
pub struct Issued {
    /// Whom it speaks for.
    pub subject: Subject,
    /// The node's certificate.
    pub certificate: Vec<u8>,
    /// The authority's certificate.
    pub authority: Vec<u8>,
}

/// A node's key before any authority has signed for it. The private half never
/// leaves the node.
pub struct NodeKey {
    pub(super) node: NodeId,
    pub(super) store: StoreId,
    pub(super) key: KeyPair,
}

/// Certificates or keys that cannot be made, read or believed.
#[derive(Debug, thiserror::Error)]
pub enum CertError {
    /// The cryptography library refused.
    #[error("cannot {what}: {detail}")]
    Crypto {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        detail: String,
    },
    /// A PEM text lacks one of its parts.
    #[error("the {what} needs exactly one private key and {certificates} certificate(s) in PEM")]
    Parts {
        /// Which text.
        what: &'static str,
        /// How many certificates it should hold.
        certificates: usize,
    },
    /// A certificate or request does not name whom it is for.
    #[error("the {what} does not name {wanted}: it was not made by elastic for a job")]
    Name {
        /// Certificate or request.
        what: &'static str,
        /// The form of the missing name.
        wanted: &'static str,
    },
    /// A certificate of another job.
    #[error("the certificate is of job {found}, this is job {wanted}")]
    OtherJob {
        /// This job.
        wanted: JobId,
        /// The certificate's job.
        found: JobId,
    },
    /// A certificate that does not belong to the key or the node it came for.
    #[error("the certificate of node {0} does not fit the key of this node: ask for a new one")]
    OtherKey(NodeId),
    /// The authority did not sign this certificate.
    #[error("the certificate is not signed by this job's authority: {0}")]
    Unsigned(String),
    /// A file that cannot be read or written.
    #[error("cannot {what} {path}: {detail}")]
    File {
        /// Read or write.
        what: &'static str,
        /// The file.
        path: String,
        /// The system's reason.
        detail: String,
    },
}

impl Authority {
    /// A new authority (ECDSA P-256) for a job.
    ///
    /// # Errors
    /// [`CertError::Crypto`].
    pub fn generate(job: JobId) -> Result<Self, CertError> {
        let key = new_key()?;
        let mut params = params(&format!("elastic job {job}"), &job_uri(job))?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate =
            params.self_signed(&key).map_err(crypto("sign the authority's certificate"))?;
        Ok(Self { job, certificate: certificate.into(), issuer: Issuer::new(params, key) })
    }

    /// Reads what [`Self::to_pem`] wrote.
    ///
    /// # Errors
    /// [`CertError`], naming what is missing.
    pub fn from_pem(text: &str) -> Result<Self, CertError> {
        const WHAT: &str = "authority";
        let (mut certificates, key) = parts(WHAT, text, 1)?;
        let certificate = certificates.remove(0);
        let name = uri_of(&certificate)?;
        let job =
            name.strip_prefix("elastic://").and_then(|job| Uuid::parse_str(job).ok()).map(JobId);
        let job = job.ok_or(CertError::Name { what: WHAT, wanted: "elastic://job" })?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key)
            .map_err(crypto("read the authority's certificate"))?;
        Ok(Self { job, certificate, issuer })
    }

    /// The certificate and the private key. Whoever has this text can admit nodes:
    /// keep it in files of mode 0600 and in the replicated state of voters.
    #[must_use]
    pub fn to_pem(&self) -> String {
        to_pem([&self.certificate], self.issuer.key())
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> JobId {
        self.job
    }

    /// What a joiner pins.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    /// The node and store that a [`NodeKey::request`] names.
    pub(super) fn requester(request: &[u8]) -> Result<(NodeId, StoreId), CertError> {
        requested(&read_request(request)?.params)
    }

    /// Signs for the node and store that a [`NodeKey::request`] names. Only the
    /// public key and the two names are taken from the request.
    ///
    /// # Errors
    /// [`CertError`] when the request is not one, or its own signature is wrong.
    pub fn issue(&self, request: &[u8]) -> Result<Issued, CertError> {
        let request = read_request(request)?;
        let (node, store) = requested(&request.params)?;
        let subject = Subject { job: self.job, node, store };
        let mut params = params(subject.node.as_str(), &subject.to_string())?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params
            .signed_by(&request.public_key, &self.issuer)
            .map_err(crypto("sign the node's certificate"))?;
        Ok(Issued {
            subject,
            certificate: certificate.der().to_vec(),
            authority: self.certificate.to_vec(),
        })
    }
}

impl NodeKey {
    /// A new key (ECDSA P-256) for a node and its store.
    ///
    /// # Errors
    /// [`CertError::Crypto`].
    pub fn generate(node: NodeId, store: StoreId) -> Result<Self, CertError> {
        Ok(Self { node, store, key: new_key()? })
    }

    /// The certificate request, in DER. It names node and store; the job is the
    /// authority's to add, since a joiner does not know it yet.
    ///
    /// # Errors
    /// [`CertError::Crypto`].
    pub fn request(&self) -> Result<Vec<u8>, CertError> {
        let name = format!("{REQUEST}{}/{}", self.node, self.store);
        let request = params(self.node.as_str(), &name)?
            .serialize_request(&self.key)
            .map_err(crypto("make the certificate request"))?;
        Ok(request.der().to_vec())
    }
}

impl Fingerprint {
    /// Of an authority's certificate in DER.
    #[must_use]
    pub fn of(certificate: &[u8]) -> Self {
        Self(Sha256::digest(certificate).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl FromStr for Fingerprint {
    type Err = hex::FromHexError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", job_uri(self.job), self.node, self.store)
    }
}

impl Subject {
    /// Reads the name out of a certificate in DER. Says nothing about who signed.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Result<Self, CertError> {
        Self::parse(&uri_of(certificate)?)
            .ok_or(CertError::Name { what: "certificate", wanted: "elastic://job/node/store" })
    }

    fn parse(uri: &str) -> Option<Self> {
        let mut parts = uri.strip_prefix("elastic://")?.split('/');
        let (job, node, store) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        Some(Self {
            job: JobId(Uuid::parse_str(job).ok()?),
            node: NodeId::new(node).ok()?,
            store: StoreId(Uuid::parse_str(store).ok()?),
        })
    }
}

/// How the one name in a certificate request begins.
const REQUEST: &str = "elastic-node://";

fn job_uri(job: JobId) -> String {
    format!("elastic://{job}")
}

/// Checks the request's own signature too: the requester has the private key.
fn read_request(request: &[u8]) -> Result<CertificateSigningRequestParams, CertError> {
    CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request))
        .map_err(crypto("read the certificate request"))
}

fn requested(params: &CertificateParams) -> Result<(NodeId, StoreId), CertError> {
    let names = &params.subject_alt_names;
    let parse = || {
        let [SanType::URI(uri)] = names.as_slice() else { return None };
        let (node, store) = uri.as_str().strip_prefix(REQUEST)?.split_once('/')?;
        Some((NodeId::new(node).ok()?, StoreId(Uuid::parse_str(store).ok()?)))
    };
    parse()
        .ok_or(CertError::Name { what: "certificate request", wanted: "elastic-node://node/store" })
}

fn uri_of(certificate: &CertificateDer<'_>) -> Result<String, CertError> {
    let parsed =
        webpki::EndEntityCert::try_from(certificate).map_err(crypto("read the certificate"))?;
    let uri = parsed.valid_uri_names().next().map(str::to_owned);
    uri.ok_or(CertError::Name { what: "certificate", wanted: "an elastic:// URI" })
}

fn new_key() -> Result<KeyPair, CertError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(crypto("make a key"))
}

fn params(common_name: &str, uri: &str) -> Result<CertificateParams, CertError> {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    params.distinguished_name = name;
    let uri = uri.try_into().map_err(crypto("name the certificate"))?;
    params.subject_alt_names = vec![SanType::URI(uri)];
    Ok(params)
}

/// Certificates, then the key, in PEM.
pub(super) fn to_pem<'a>(
    certificates: impl IntoIterator<Item = &'a CertificateDer<'static>>,
    key: &KeyPair,
) -> String {
    let mut blocks: Vec<_> =
        certificates.into_iter().map(|der| pem::Pem::new(CERTIFICATE, der.to_vec())).collect();
    blocks.push(pem::Pem::new(PRIVATE_KEY, key.serialize_der()));
    pem::encode_many_config(&blocks, pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF))
}

/// Reads what [`to_pem`] wrote.
pub(super) fn parts(
    what: &'static str,
    text: &str,
    certificates: usize,
) -> Result<(Vec<CertificateDer<'static>>, KeyPair), CertError> {
    let blocks = pem::parse_many(text).map_err(crypto("read PEM"))?;
    let (mut chain, mut keys) = (Vec::new(), Vec::new());
    for block in blocks {
        match block.tag() {
            CERTIFICATE => chain.push(CertificateDer::from(block.into_contents())),
            PRIVATE_KEY => keys.push(block.into_contents()),
            _ => {}
        }
    }
    let [key] = keys.as_slice() else { return Err(CertError::Parts { what, certificates }) };
    if chain.len() != certificates {
        return Err(CertError::Parts { what, certificates });
    }
    let key = KeyPair::try_from(key.as_slice()).map_err(crypto("read the private key"))?;
    Ok((chain, key))
}

pub(super) fn crypto<E: fmt::Display>(what: &'static str) -> impl FnOnce(E) -> CertError {
    move |error| CertError::Crypto { what, detail: error.to_string() }
}
