package scheduling

import (
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Explanation is what is wrong with the pods of the cluster at one moment. It is shared by all readers, which must not change
// it.
type Explanation struct {
	// At is when it was made.
	At time.Time
	// Pending are the pending pods, ordered by namespace and name, Diagnoses are why each of them is pending, and Places where it is in the queue.
	Pending   []*clustercache.PodInfo
	Diagnoses []diagnosis.Diagnosis
	Places    []diagnosis.Place
	// RequestProblems are the pods that get no GPU memory although they seem to ask for some, ordered by namespace and name:
	// see PodInfo.RequestProblem. Most of them run.
	RequestProblems []*clustercache.PodInfo
	// Reported are the bound pods with over-use, with a limit that is not in force, or bound without the extender, ordered by namespace and
	// name.
	Reported []*clustercache.PodInfo
	// Tenants are the tenants, by name; nil if fair sharing is off.
	Tenants []dispatch.Tenant
	// Stranded is the free memory that is of no use; none with a node policy for which no pods are expected.
	Stranded ledger.Stranded
}

// ExplainShare limits the part of the time that explanations take. The time from the start of one explanation to the start of the next one is
// at least ExplainShare times its duration. The web page uses the same limit for encoding explanations and groups.
const ExplainShare = 50

// explainer holds the last explanation. mu guards its fields.
type explainer struct {
	mu   sync.Mutex
	last *Explanation
	// next is when the next one may be made.
	next time.Time
}

// ExplainPause returns the time from the start of an explanation, which took that long, to the start of the next one. It is a minute at most:
// the duration can include time in which the process was stopped and used no processor.
func ExplainPause(took time.Duration) time.Duration {
	return min(max(minCostly, ExplainShare*took), maxCostly)
}
