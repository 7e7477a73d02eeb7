package reasons

// Result is how an action ended, as a label of metrics.
type Result string

// The results.
const (
	// ResultBound: the pod is bound.
	ResultBound Result = "bound"
	// ResultNoRoom: another pod got the card between filter and bind.
	ResultNoRoom     Result = "no_room"
	ResultNotReady   Result = "not_ready"
	ResultNotLeading Result = "not_leading"
	ResultBadRequest Result = "bad_request"
	// ResultInvalidRequest: no node can give the pod what it asks for now.
	ResultInvalidRequest Result = "invalid_request"
	// ResultUnreachable: the pod or the pods of its node could not be read, or no time was left for the write. Nothing was written.
	ResultUnreachable Result = "unreachable"
	// ResultRejected: the API server rejected the write.
	ResultRejected Result = "rejected"
	// ResultUnconfirmed: the answer was lost, see binding.ErrUnconfirmed.
	ResultUnconfirmed Result = "unconfirmed"
	ResultInFlight    Result = "in_flight"
	// ResultHeldBack: the pod's gang does not permit the bind yet.
	ResultHeldBack Result = "held_back"

	// ResultNotBound and ResultGone are results of unconfirmed binds. A pod is gone if it was deleted or has ended.
	ResultNotBound Result = "not_bound"
	ResultGone     Result = "gone"

	// ResultEvicted: all victims are evicted.
	ResultEvicted Result = "evicted"
	// ResultRefused: a disruption budget forbids an eviction.
	ResultRefused Result = "refused"
	ResultFailed  Result = "failed"

	// ResultMade: the nomination is written.
	ResultMade Result = "made"
	// ResultConflict: the pod had changed.
	ResultConflict Result = "conflict"
	// ResultRemoved: the nomination is removed.
	ResultRemoved Result = "removed"

	// ResultOpened: the scheduling gate is removed.
	ResultOpened Result = "opened"
)

// BindResults returns the results of bind calls.
func BindResults() []Result {
	return []Result{
		ResultBound, ResultNoRoom, ResultNotReady, ResultNotLeading, ResultBadRequest, ResultInvalidRequest, ResultUnreachable, ResultRejected,
		ResultUnconfirmed, ResultInFlight, ResultHeldBack,
	}
}

// ResolveResults returns the results of binds whose answer was lost.
func ResolveResults() []Result { return []Result{ResultBound, ResultNotBound, ResultGone} }

// EvictionResults returns the results of evictions.
func EvictionResults() []Result { return []Result{ResultEvicted, ResultRefused, ResultFailed} }

// NominationResults returns the results of writes of nominations.
func NominationResults() []Result {
	return []Result{ResultMade, ResultConflict, ResultFailed, ResultRemoved}
}

// GateResults returns the results of writes that remove scheduling gates.
func GateResults() []Result { return []Result{ResultOpened, ResultFailed} }
