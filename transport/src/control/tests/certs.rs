use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::control::{CertError, JoinToken, NodeKey, Subject, TokenError, tls};

#[test]
fn an_authority_survives_its_text() {
    let authority = authority();
    let again = Authority::from_pem(&authority.to_pem()).expect("its own text");
    assert_eq!((again.job(), again.fingerprint()), (authority.job(), authority.fingerprint()));
    let early = Identity::found(&authority, name(1), store(1)).expect("an identity");
    let late = Identity::found(&again, name(2), store(2)).expect("an identity");
    for identity in [&early, &late] {
        let now = rustls::pki_types::UnixTime::now();
        let subject = tls::verify(&identity.certificate, &early.authority, now);
        assert_eq!(&subject.expect("signed"), identity.subject());
    }
    let only_certificate = authority.to_pem();
    let end = only_certificate.find("-----BEGIN PRIVATE").expect("a key");
    let broken = Authority::from_pem(&only_certificate[..end]);
    assert!(matches!(broken, Err(CertError::Parts { .. })));
}

#[test]
fn an_identity_survives_its_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("identity.pem");
    let identity = Identity::found(&authority(), name(7), store(7)).expect("an identity");
    for _ in 0..2 {
        identity.save(&path).expect("saved");
    }
    let mode = std::fs::metadata(&path).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = Identity::load(&path).expect("loaded");
    let expected = Subject { job: job(1), node: name(7), store: store(7) };
    assert_eq!(again.subject(), &expected);
    assert_eq!(expected.to_string(), format!("elastic://{}/node-7/{}", job(1), store(7)));
    let missing = Identity::load(&folder.path().join("none")).expect_err("missing").to_string();
    assert!(missing.starts_with("cannot read ") && missing.contains("none"), "{missing}");
}

#[test]
fn a_certificate_fits_one_key_and_one_authority() {
    let (authority, other) = (authority(), authority());
    let (key, stolen) =
        (NodeKey::generate(name(1), store(1)), NodeKey::generate(name(1), store(1)));
    let (key, stolen) = (key.expect("a key"), stolen.expect("a key"));
    let issued = authority.issue(&key.request().expect("a request")).expect("issued");
    let misfit = Identity::new(stolen, &issued.certificate, &issued.authority);
    assert!(matches!(misfit, Err(CertError::OtherKey(_))));
    let foreign = other.issue(&key.request().expect("a request")).expect("issued");
    let unsigned = Identity::new(key, &issued.certificate, &foreign.authority);
    assert!(matches!(unsigned, Err(CertError::Unsigned(_))), "{unsigned:?}");
}

#[test]
fn a_request_that_is_garbage_is_an_error() {
    for garbage in [&b""[..], b"garbage", &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]] {
        assert!(authority().issue(garbage).is_err());
    }
    let mut request = NodeKey::generate(name(1), store(1)).expect("a key").request().expect("one");
    let last = request.len() - 1;
    request[last] ^= 1;
    assert!(authority().issue(&request).is_err(), "a forged signature");
}

#[test]
fn tokens() {
    let pin = authority().fingerprint();
    check("0123456789abcdef", Ok(false));
    check("  correct horse battery staple ", Ok(false));
    check("E1.0123456789abcdef", Ok(false));
    check(&format!("E1.0123456789abcdef.{pin}"), Ok(true));
    check(&format!("E1.with.dots.and more.{pin}"), Ok(true));
    check("0123456789abcde", Err("15 characters"));
    check("", Err("0 characters"));
    check("E1.0123456789abcdef.beef", Err("64 hex digits"));
    check(&"x".repeat(513), Err("513 characters"));
    check(&JoinToken::generate(None).expect("a token").to_string(), Ok(false));
    check(&JoinToken::generate(Some(pin)).expect("a token").to_string(), Ok(true));

    /// Whether the token has a pin, or a part of what is wrong.
    #[track_caller]
    fn check(text: &str, expected: Result<bool, &str>) {
        let parsed: Result<JoinToken, TokenError> = text.parse();
        match (parsed, expected) {
            (Ok(token), Ok(pinned)) => {
                assert_eq!(token.pin().is_some(), pinned);
                assert_eq!(token.to_string().parse::<JoinToken>().expect("its text"), token);
                assert!(!format!("{token:?}").contains("0123"), "Debug shows the secret");
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, expected) => panic!("{got:?}, not {expected:?}"),
        }
    }
}
