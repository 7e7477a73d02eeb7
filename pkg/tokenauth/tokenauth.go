// Package tokenauth restricts an HTTP handler to clients with a bearer token that the API server accepts and that may
// request the path. It uses TokenReview and SubjectAccessReview, as the Kubernetes components do for /metrics.
package tokenauth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// allowedTTL and deniedTTL are how long a decision is cached.
	allowedTTL = time.Minute
	deniedTTL  = 10 * time.Second
	// renewalTTL is how long a token that was allowed is preferred to unknown ones: longer than the interval of two scrapes.
	renewalTTL = time.Hour
	// maxDecisions limits the cached decisions, maxReviews the concurrent reviews of unknown tokens, and those of tokens that
	// were allowed before, because any client can send tokens.
	maxDecisions = 1024
	maxReviews   = 4
	// maxToken is the maximum length of a token, more than that of any ServiceAccount token.
	maxToken      = 16 << 10
	reviewTimeout = 5 * time.Second
)

// The reasons why a request is rejected.
var (
	errNoToken      = errors.New("the request has no bearer token")
	errUnknownToken = errors.New("the API server doesn't accept the bearer token")
	errForbidden    = errors.New("forbidden")
	errBusy         = errors.New("too many requests are being authorized at the moment")
)

// Reviewer authenticates and authorizes clients with the API server. Its methods are safe for concurrent use.
type Reviewer struct {
	api       api
	decisions *cache.LRUExpireCache // By key, of error: nil allows.
	// allowed has the keys that the last review allowed, also after that decision has expired. Unknown tokens take up the
	// places of reviews, and those of renewals aren't theirs: they don't keep a monitoring system out.
	allowed           *cache.LRUExpireCache
	reviews, renewals chan struct{}
}

// New returns a Reviewer with its own client and rate limit, so that requests with tokens don't delay other calls.
func New(config *rest.Config) (*Reviewer, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 10, 20
	client, err := newClient(config)
	if err != nil {
		return nil, fmt.Errorf("making a client for the API server: %w", err)
	}
	return newReviewer(client, clock.RealClock{}), nil
}

func newReviewer(api api, clock clock.PassiveClock) *Reviewer {
	return &Reviewer{
		api: api, decisions: cache.NewLRUExpireCacheWithClock(maxDecisions, clock), allowed: cache.NewLRUExpireCacheWithClock(maxDecisions, clock),
		reviews: make(chan struct{}, maxReviews), renewals: make(chan struct{}, maxReviews),
	}
}

// Handler returns a handler that passes authorized requests to next. It responds with 401 if the API server doesn't accept
// the token or there is none, with 403 if the client may not request the path, and with 503 if there was no review.
func (r *Reviewer) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		err := r.authorize(request)
		switch {
		case err == nil:
			next.ServeHTTP(w, request)
		case errors.Is(err, errNoToken), errors.Is(err, errUnknownToken):
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, err.Error(), http.StatusUnauthorized)
		case errors.Is(err, errForbidden):
			http.Error(w, err.Error(), http.StatusForbidden)
		default:
			klog.FromContext(request.Context()).V(2).Info("Client not authorized, because there was no review", "path", request.URL.Path, "err", err)
			http.Error(w, "the client can't be authorized at the moment", http.StatusServiceUnavailable)
		}
	})
}

// key identifies a decision. It contains a hash of the token, so that no token is kept in memory.
type key struct {
	token      [sha256.Size]byte
	verb, path string
}

func (r *Reviewer) authorize(request *http.Request) error {
	scheme, token, _ := strings.Cut(request.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return errNoToken
	}
	if len(token) > maxToken {
		return errUnknownToken
	}
	k := key{sha256.Sum256([]byte(token)), strings.ToLower(request.Method), request.URL.Path}
	if decision, known := r.decisions.Get(k); known {
		err, _ := decision.(error)
		return err
	}
	places := r.reviews
	if _, before := r.allowed.Get(k); before {
		places = r.renewals
	}
	select {
	case places <- struct{}{}:
		defer func() { <-places }()
	default:
		return errBusy
	}
	ctx, cancel := context.WithTimeout(request.Context(), reviewTimeout)
	defer cancel()
	err := r.review(ctx, token, k)
	switch {
	case err == nil:
		r.decisions.Add(k, nil, allowedTTL)
		r.allowed.Add(k, nil, renewalTTL)
	case errors.Is(err, errUnknownToken), errors.Is(err, errForbidden):
		r.decisions.Add(k, err, deniedTTL)
		r.allowed.Remove(k)
	}
	return err
}

// review returns nil if the API server authorizes the request. An error other than errUnknownToken and errForbidden means
// that the API server made no decision.
func (r *Reviewer) review(ctx context.Context, token string, k key) error {
	identity, err := r.api.ReviewToken(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}})
	if err != nil {
		return fmt.Errorf("reviewing a token: %w", err)
	}
	if !identity.Status.Authenticated {
		return errUnknownToken
	}
	user := identity.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for name, values := range user.Extra {
		extra[name] = authorizationv1.ExtraValue(values)
	}
	access, err := r.api.ReviewAccess(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: k.path, Verb: k.verb},
	}})
	if err != nil {
		return fmt.Errorf("reviewing the access of user %s: %w", user.Username, err)
	}
	if !access.Status.Allowed {
		return fmt.Errorf("%w: user %.253q may not %s path %q", errForbidden, user.Username, k.verb, k.path)
	}
	return nil
}
