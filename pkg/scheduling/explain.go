package scheduling

import (
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
)

// Explanation is what is wrong with the pods of the cluster at one moment. It is shared by all readers, which must not change
// it.
type Explanation struct {
	// At is when it was made.
	At time.Time
	// Pending are the pending pods, ordered by namespace and name, and Diagnoses are why each of them is pending.
	Pending   []*clustercache.PodInfo
	Diagnoses []diagnosis.Diagnosis
	// RequestProblems are the pods that get no GPU memory although they seem to ask for some, ordered by namespace and name:
	// see PodInfo.RequestProblem. Most of them run.
	RequestProblems []*clustercache.PodInfo
	// Reported are the bound pods of which a device plugin reports over-use, or a limit that is not in force, ordered by namespace
	// and name.
	Reported []*clustercache.PodInfo
	// Tenants are the tenants, by name; nil if fair sharing is off.
	Tenants []dispatch.Tenant
}

const (
	// explainEvery is the least time between two explanations.
	explainEvery = time.Second
	// ExplainShare limits the share of the time that explanations take: at least that many times the duration of one passes
	// between its beginning and that of the next one. The web page limits in the same way how often it encodes explanations and groups.
	ExplainShare = 50
)

// explainer holds the last explanation. mu guards its fields.
type explainer struct {
	mu   sync.Mutex
	last *Explanation
	// next is when the next one may be made.
	next time.Time
}

// Explain returns why pods are pending. It is made at most once per second, and less often if that takes long, however many
// callers there are: a caller gets the last one until then.
func (s *Scheduler) Explain() *Explanation {
	e := &s.explainer
	e.mu.Lock()
	defer e.mu.Unlock()
	begin := s.Clock.Now()
	if e.last != nil && begin.Before(e.next) {
		return e.last
	}
	pods := s.cache.Pending()
	e.last = &Explanation{
		At: begin, Pending: pods, Diagnoses: s.diagnose(pods), RequestProblems: s.cache.RequestProblems(), Reported: s.cache.Reported(),
		Tenants: s.Tenants(),
	}
	e.next = begin.Add(ExplainPause(s.Clock.Since(begin)))
	return e.last
}

// ExplainPause returns the time from the begin of one explanation, which took that long, to the next one: a minute at most, because a
// process that was stopped meanwhile has used no processor time.
func ExplainPause(took time.Duration) time.Duration {
	return min(max(explainEvery, ExplainShare*took), time.Minute)
}
