// Package tokenauth lets only those clients through to an HTTP handler whose bearer token the API server knows, and that
// may request the path: by TokenReview and SubjectAccessReview, as Kubernetes' own components do for /metrics.
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
	// allowedTTL and deniedTTL are how long a decision is used without another review.
	allowedTTL = time.Minute
	deniedTTL  = 10 * time.Second
	// renewalTTL is how long a token that was allowed keeps its place beside unknown ones: longer than between two scrapes.
	renewalTTL = time.Hour
	// maxDecisions bounds the decisions that are remembered, maxReviews the reviews of unknown tokens that are under way, and
	// those of tokens that were allowed before: every client can send tokens.
	maxDecisions = 1024
	maxReviews   = 4
	// maxToken is longer than the token of any ServiceAccount.
	maxToken      = 16 << 10
	reviewTimeout = 5 * time.Second
)

// The reasons for which a request is refused.
var (
	errNoToken      = errors.New("the request has no bearer token")
	errUnknownToken = errors.New("the API server doesn't accept the bearer token")
	errBusy         = errors.New("too many requests are being authorized at the moment")
)

// Reviewer asks the API server which user a client is, and whether that user may request a path.
type Reviewer struct {
	api       api
	decisions *cache.LRUExpireCache // By key, of error: nil allows.
	// allowed has the keys that the last review allowed, also after that decision has expired. Unknown tokens take up the
	// places of reviews, and those of renewals aren't theirs: they don't keep a monitoring system out.
	allowed           *cache.LRUExpireCache
	reviews, renewals chan struct{}
}

// New returns a Reviewer with a client of its own, so that a flood of tokens slows down nothing else.
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

// Handler returns a handler that answers 401 to clients without a token that the API server accepts, 403 to those that may
// not request the path, and 503 where the API server doesn't say. It passes all others on to next.
func (r *Reviewer) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		err := r.authorize(request)
		var forbidden forbiddenError
		switch {
		case err == nil:
			next.ServeHTTP(w, request)
		case errors.Is(err, errNoToken), errors.Is(err, errUnknownToken):
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, err.Error(), http.StatusUnauthorized)
		case errors.As(err, &forbidden):
			http.Error(w, err.Error(), http.StatusForbidden)
		default:
			klog.FromContext(request.Context()).V(2).Info("A client could not be authorized", "path", request.URL.Path, "err", err)
			http.Error(w, "the client can't be authorized at the moment", http.StatusServiceUnavailable)
		}
	})
}

// forbiddenError says that a user is known, and may not do what it asked for.
type forbiddenError struct{ user, verb, path string }

func (e forbiddenError) Error() string {
	return fmt.Sprintf("user %.253q may not %s path %q", e.user, e.verb, e.path)
}

// key is what a decision depends on. The token itself isn't kept.
type key struct {
	token      [sha256.Size]byte
	verb, path string
}

func (r *Reviewer) authorize(request *http.Request) error {
	scheme, token, _ := strings.Cut(request.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(scheme, "Bearer") || token == "" {
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
	var forbidden forbiddenError
	switch {
	case err == nil:
		r.decisions.Add(k, nil, allowedTTL)
		r.allowed.Add(k, nil, renewalTTL)
	case errors.Is(err, errUnknownToken), errors.As(err, &forbidden):
		r.decisions.Add(k, err, deniedTTL)
		r.allowed.Remove(k)
	}
	return err
}

// review asks the API server. An error other than errUnknownToken and forbiddenError says that it didn't decide.
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
	may, err := r.api.ReviewAccess(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: k.path, Verb: k.verb},
	}})
	if err != nil {
		return fmt.Errorf("reviewing the access of user %s: %w", user.Username, err)
	}
	if !may.Status.Allowed {
		return forbiddenError{user.Username, k.verb, k.path}
	}
	return nil
}
