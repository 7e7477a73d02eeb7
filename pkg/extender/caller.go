package extender

import (
	"crypto/tls"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

// The reasons for which a request is refused before its body is read.
var (
	errOrigin      = errors.New("the request has an Origin header: it comes from a web page, not from kube-scheduler")
	errContentType = errors.New("the request's Content-Type is not application/json")
)

// checkClient returns why a client may call nothing below Prefix, or nil. The name of a client is the common name of its
// certificate, as for the API server: approvers of certificates in Kubernetes judge them by that name.
func (s *Server) checkClient(state *tls.ConnectionState) error {
	if len(s.ClientNames) == 0 {
		return nil
	}
	if state == nil || len(state.VerifiedChains) == 0 {
		return errors.New("the client has shown no certificate")
	}
	if name := state.PeerCertificates[0].Subject.CommonName; !slices.Contains(s.ClientNames, name) {
		return fmt.Errorf("the client's certificate has the common name %.64q, --client-names allows %s", name, strings.Join(s.ClientNames, ", "))
	}
	return nil
}

// clientsOnly answers only clients that checkClient accepts.
func (s *Server) clientsOnly(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := s.checkClient(r.TLS); err != nil {
			s.refuse(w, r, http.StatusForbidden, err)
			return
		}
		next(w, r)
	}
}

// schedulerOnly answers only requests that kube-scheduler can have sent. It always sends JSON and says so
// (k8s.io/kubernetes pkg/scheduler/extender.go, send). A browser can be made to send other types to any address, and names
// the page's origin.
func (s *Server) schedulerOnly(verb string, next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		mediaType, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		status, err := http.StatusForbidden, s.checkClient(r.TLS)
		switch {
		case err != nil:
		case r.Header.Get("Origin") != "":
			err = errOrigin
		case mediaType != "application/json":
			status, err = http.StatusUnsupportedMediaType, errContentType
		default:
			if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
				s.Observer.CertificateExpires(CertificateClient, expiry(r.TLS.VerifiedChains[0]))
			}
			next(w, r)
			return
		}
		s.refuse(w, r, status, err)
		s.Observer.Answered(verb, OutcomeError, time.Since(start))
	}
}

// refuse answers with an error. The log has one such line a minute: clients can cause any number.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, status int, err error) {
	s.refusals.Do(func() {
		klog.FromContext(r.Context()).Error(err, "Refused a request", "path", r.URL.Path, "client", r.RemoteAddr)
	})
	http.Error(w, err.Error(), status)
}
