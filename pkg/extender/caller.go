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

// The errors for requests that are rejected before their body is read.
var (
	errOrigin      = errors.New("the request has an Origin header: it comes from a web page, not from kube-scheduler")
	errContentType = errors.New("the request's Content-Type is not application/json")
)

// checkClient returns the reason why the client must not call any path below Prefix, or nil. A client's name is the common
// name of its certificate, as for the API server. Approvers of certificates in Kubernetes decide by that name.
func (s *Server) checkClient(state *tls.ConnectionState) error {
	if len(s.ClientNames) == 0 {
		return nil
	}
	if state == nil || len(state.VerifiedChains) == 0 {
		return errors.New("the client presented no certificate")
	}
	if name := state.PeerCertificates[0].Subject.CommonName; !slices.Contains(s.ClientNames, name) {
		return fmt.Errorf("the client's certificate has the common name %.64q, --client-names allows %s", name, strings.Join(s.ClientNames, ", "))
	}
	return nil
}

// clientsOnly rejects clients that checkClient rejects.
func (s *Server) clientsOnly(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := s.checkClient(r.TLS); err != nil {
			s.reject(w, r, http.StatusForbidden, err)
			return
		}
		next(w, r)
	}
}

// schedulerOnly rejects requests that kube-scheduler can't have sent. kube-scheduler always sends JSON with the matching
// Content-Type (k8s.io/kubernetes pkg/scheduler/extender.go, send). A web page can make a browser send other types to any
// address, and the browser adds the page's origin.
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
		s.reject(w, r, status, err)
		s.Observer.Answered(verb, OutcomeError, time.Since(start))
	}
}

// reject answers with an error. At most one rejection a minute is logged, because clients can cause any number of them.
func (s *Server) reject(w http.ResponseWriter, r *http.Request, status int, err error) {
	s.rejections.Do(func() {
		klog.FromContext(r.Context()).Error(err, "Rejected a request", "path", r.URL.Path, "client", r.RemoteAddr)
	})
	http.Error(w, err.Error(), status)
}
