package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// validity is longer than any demo is left running.
const validity = 365 * 24 * time.Hour

// authority signs the certificates of one control plane. It is not stored: each new control plane has its own.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

// pair is a certificate and its key, both in PEM.
type pair struct{ certificate, key []byte }

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the authority's key: %w", err)
	}
	template := template(pkix.Name{CommonName: "gpushare-test-ca"})
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing the authority's certificate: %w", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("reading the authority's certificate: %w", err)
	}
	return &authority{certificate: certificate, key: key, pem: encode("CERTIFICATE", der)}, nil
}

// serving issues a certificate for a server on loopback, and at the address of the Service kubernetes.
func (a *authority) serving(name string) (pair, error) {
	template := template(pkix.Name{CommonName: name})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.DNSNames = []string{"localhost"}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.IPv4(10, 0, 0, 1)}
	return a.issue(template)
}

// client issues a certificate that the API server accepts as this user of these groups.
func (a *authority) client(user string, groups []string) (pair, error) {
	template := template(pkix.Name{CommonName: user, Organization: groups})
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.issue(template)
}

func (a *authority) issue(template *x509.Certificate) (pair, error) {
	name := template.Subject.CommonName
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, fmt.Errorf("making a key for %s: %w", name, err)
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return pair{}, fmt.Errorf("signing a certificate for %s: %w", name, err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return pair{}, fmt.Errorf("writing the key of %s: %w", name, err)
	}
	return pair{certificate: encode("CERTIFICATE", der), key: keyPEM}, nil
}

func template(name pkix.Name) *x509.Certificate {
	now := time.Now()
	serial := new(big.Int).SetInt64(now.UnixNano())
	return &x509.Certificate{
		SerialNumber: serial, Subject: name, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(validity),
	}
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return encode("PRIVATE KEY", der), nil
}

// files are the paths for the components' flags.
type files struct {
	ca, servingCertificate, servingKey, accountKey, accountPublicKey string
}

// write writes the files that the components read into dir: the authority, one serving certificate for all of them, and
// the key that signs ServiceAccount tokens.
func (a *authority) write(dir string) (files, error) {
	serving, err := a.serving("gpushare-test")
	if err != nil {
		return files{}, err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return files{}, fmt.Errorf("making the key for ServiceAccounts: %w", err)
	}
	accountKey, err := encodeKey(accounts)
	if err != nil {
		return files{}, fmt.Errorf("writing the key for ServiceAccounts: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(accounts.Public())
	if err != nil {
		return files{}, fmt.Errorf("writing the public key for ServiceAccounts: %w", err)
	}
	out := files{
		ca:                 filepath.Join(dir, "ca.crt"),
		servingCertificate: filepath.Join(dir, "serving.crt"),
		servingKey:         filepath.Join(dir, "serving.key"),
		accountKey:         filepath.Join(dir, "service-accounts.key"),
		accountPublicKey:   filepath.Join(dir, "service-accounts.pub"),
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return files{}, fmt.Errorf("making the folder of the certificates: %w", err)
	}
	for path, data := range map[string][]byte{
		out.ca:                 a.pem,
		out.servingCertificate: serving.certificate,
		out.servingKey:         serving.key,
		out.accountKey:         accountKey,
		out.accountPublicKey:   encode("PUBLIC KEY", public),
	} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return files{}, fmt.Errorf("writing a certificate: %w", err)
		}
	}
	return out, nil
}
