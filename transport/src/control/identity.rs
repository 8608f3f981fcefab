//! A node's identity: its certificate, its key and the authority it trusts
//! (SEC-1). On disk it is one PEM file of mode 0600, replaced atomically.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use job::{JobId, NodeId, StoreId};
use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};

use super::{
    certs::{self, Authority, CertError, Fingerprint, Issued, NodeKey, Subject, crypto},
    tls,
};

/// What a node needs to open and to accept links.
pub struct Identity {
    subject: Subject,
    pub(super) certificate: CertificateDer<'static>,
    pub(super) authority: CertificateDer<'static>,
    key: KeyPair,
}

impl Identity {
    /// The identity of the founder, who has the authority at hand.
    ///
    /// # Errors
    /// [`CertError`].
    pub fn found(authority: &Authority, node: NodeId, store: StoreId) -> Result<Self, CertError> {
        let key = NodeKey::generate(node, store)?;
        let issued = authority.issue(&key.request()?)?;
        Self::new(key, &issued.certificate, &issued.authority)
    }

    /// Puts a key and the certificate issued for it together (both certificates
    /// in DER), after checking that they fit and that the authority signed.
    ///
    /// # Errors
    /// [`CertError`].
    pub fn new(key: NodeKey, certificate: &[u8], authority: &[u8]) -> Result<Self, CertError> {
        let identity = Self::assemble(
            key.key,
            CertificateDer::from(certificate.to_vec()),
            CertificateDer::from(authority.to_vec()),
        )?;
        if identity.subject.node != key.node || identity.subject.store != key.store {
            return Err(CertError::OtherKey(identity.subject.node));
        }
        Ok(identity)
    }

    /// Reads what [`Self::save`] wrote.
    ///
    /// # Errors
    /// [`CertError`].
    pub fn load(path: &Path) -> Result<Self, CertError> {
        let text = fs::read_to_string(path).map_err(file("read", path))?;
        let (mut certificates, key) = certs::parts("identity", &text, 2)?;
        let authority = certificates.remove(1);
        let certificate = certificates.remove(0);
        Self::assemble(key, certificate, authority)
    }

    /// Writes the file: node certificate, authority's certificate, private key.
    ///
    /// # Errors
    /// [`CertError::File`].
    pub fn save(&self, path: &Path) -> Result<(), CertError> {
        let text = certs::to_pem([&self.certificate, &self.authority], &self.key);
        write_private(path, text.as_bytes()).map_err(file("write", path))
    }

    /// Whom the certificate speaks for.
    #[must_use]
    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> JobId {
        self.subject.job
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.subject.node
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.subject.store
    }

    /// Of the job's authority.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.authority)
    }

    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.clone(), self.authority.clone()]
    }

    pub(super) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.serialize_der()))
    }

    fn assemble(
        key: KeyPair,
        certificate: CertificateDer<'static>,
        authority: CertificateDer<'static>,
    ) -> Result<Self, CertError> {
        let subject = tls::verify(&certificate, &authority, UnixTime::now())?;
        let parsed = webpki::EndEntityCert::try_from(&certificate)
            .map_err(crypto("read the node's certificate"))?;
        if parsed.subject_public_key_info().as_ref() != key.subject_public_key_info() {
            return Err(CertError::OtherKey(subject.node));
        }
        Ok(Self { subject, certificate, authority, key })
    }
}

impl TryFrom<(NodeKey, Issued)> for Identity {
    type Error = CertError;
    fn try_from((key, issued): (NodeKey, Issued)) -> Result<Self, CertError> {
        Self::new(key, &issued.certificate, &issued.authority)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.subject)
    }
}

/// Written beside and renamed, so that a crash leaves the old file or the new one.
fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    // A file left by a crash might have another mode.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CertError {
    let path = path.display().to_string();
    move |error| CertError::File { what, path, detail: error.to_string() }
}
