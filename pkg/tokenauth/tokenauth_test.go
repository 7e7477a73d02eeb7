package tokenauth

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	clocktesting "k8s.io/utils/clock/testing"
)

// apiServer knows the token "prometheus", whose user may get /metrics, and "tenant", whose user may not. It counts the
// reviews of tokens.
type apiServer struct {
	down    bool
	reviews int
}

func (a *apiServer) ReviewToken(_ context.Context, review *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	a.reviews++
	if a.down {
		return nil, errors.New("down")
	}
	answer := review.DeepCopy()
	if token := review.Spec.Token; token == "prometheus" || token == "tenant" {
		answer.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{
			Username: token, Groups: []string{"system:authenticated"}, Extra: map[string]authenticationv1.ExtraValue{"pod": {"p"}},
		}}
	}
	return answer, nil
}

func (a *apiServer) ReviewAccess(_ context.Context, review *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error) {
	answer, spec := review.DeepCopy(), review.Spec
	answer.Status.Allowed = spec.User == "prometheus" && spec.Groups[0] == "system:authenticated" && spec.Extra["pod"][0] == "p" &&
		*spec.NonResourceAttributes == authorizationv1.NonResourceAttributes{Path: "/metrics", Verb: "get"}
	return answer, nil
}

func TestHandler(t *testing.T) {
	for name, test := range map[string]struct {
		authorization string
		down          bool
		status        int
		body          string
	}{
		"an authorized user":            {"Bearer prometheus", false, 200, "series"},
		"a scheme in lower case":        {"bearer prometheus", false, 200, "series"},
		"an unauthorized user":          {"Bearer tenant", false, 403, `user "tenant" may not get path "/metrics"`},
		"an unknown token":              {"Bearer nonsense", false, 401, errUnknownToken.Error()},
		"a token that is too long":      {"Bearer " + strings.Repeat("x", maxToken+1), false, 401, errUnknownToken.Error()},
		"no token":                      {"", false, 401, errNoToken.Error()},
		"an empty token":                {"Bearer ", false, 401, errNoToken.Error()},
		"another scheme":                {"Basic prometheus", false, 401, errNoToken.Error()},
		"an API server that is down":    {"Bearer prometheus", true, 503, "can't be authorized at the moment"},
		"no token and a server is down": {"", true, 401, errNoToken.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.api.down = test.down
			w := ask(f.Reviewer, test.authorization)
			if w.Code != test.status || !strings.Contains(w.Body.String(), test.body) {
				t.Errorf("%d %s, want %d %s", w.Code, w.Body, test.status, test.body)
			}
			if asks := w.Header().Get("WWW-Authenticate") != ""; asks != (test.status == 401) {
				t.Errorf("asks for a token: %t", asks)
			}
		})
	}
}

func ask(r *Reviewer, authorization string) *httptest.ResponseRecorder {
	request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	request.Header.Set("Authorization", authorization)
	w := httptest.NewRecorder()
	r.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "series") })).ServeHTTP(w, request)
	return w
}

// fixture is a Reviewer with its API server and its clock.
type fixture struct {
	*testing.T
	*Reviewer
	api   *apiServer
	clock *clocktesting.FakePassiveClock
}

func newFixture(t *testing.T) fixture {
	api, clock := &apiServer{}, clocktesting.NewFakePassiveClock(time.Now())
	return fixture{t, newReviewer(api, clock), api, clock}
}

// want asks with the token, and checks the status and the number of reviews so far.
func (f fixture) want(token string, status, reviews int) {
	f.Helper()
	if w := ask(f.Reviewer, "Bearer "+token); w.Code != status || f.api.reviews != reviews {
		f.Errorf("%s: status %d after %d reviews, want %d after %d", token, w.Code, f.api.reviews, status, reviews)
	}
}

func TestDecisionCache(t *testing.T) {
	f := newFixture(t)
	f.want("prometheus", 200, 1)
	f.want("tenant", 403, 2)
	f.want("prometheus", 200, 2)
	f.want("tenant", 403, 2)
	f.clock.SetTime(f.clock.Now().Add(deniedTTL + time.Second))
	f.want("prometheus", 200, 2)
	f.want("tenant", 403, 3)
	f.clock.SetTime(f.clock.Now().Add(allowedTTL))
	f.want("prometheus", 200, 4)
	// Failed reviews are not cached.
	f.api.down = true
	f.want("another", 503, 5)
	f.want("another", 503, 6)
}

// TestMaxReviews checks that unknown tokens cause a bounded number of concurrent reviews, and keep no token out that was
// allowed before.
func TestMaxReviews(t *testing.T) {
	f := newFixture(t)
	f.want("prometheus", 200, 1)
	f.want("tenant", 403, 2)
	for range maxReviews {
		f.reviews <- struct{}{}
	}
	f.want("nonsense", 503, 2)
	f.want("prometheus", 200, 2)
	f.clock.SetTime(f.clock.Now().Add(allowedTTL + time.Second))
	f.want("prometheus", 200, 3)
	f.want("tenant", 503, 3)
}
