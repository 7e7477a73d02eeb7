package inspect

import (
	"bytes"
	"fmt"
	"strconv"
	"time"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// writePending writes the pending pods, and what is wrong with the cluster and with the requests of pods. It writes nothing if there is
// nothing of this.
func writePending(out *bytes.Buffer, report Report, f format) {
	pendingRows(report.PendingPods, f.wide).writeAlone(out, f)
	if !f.rowsOnly {
		writeClusterProblems(out, report, f)
		requestRows(report.RequestProblems).writeSection(out, f.look, requestTitle)
	}
}

// writePods writes the sections about pods below the nodes.
func writePods(out *bytes.Buffer, report Report, f format) {
	pendingRows(report.PendingPods, f.wide).writeSection(out, f.look, "Pending Pods:")
	requestRows(report.RequestProblems).writeSection(out, f.look, requestTitle)
}

const requestTitle = "Request Problems:"

func requestRows(problems []RequestProblem) rows {
	table := rows{{bold, []string{"NAMESPACE", "NAME", "PROBLEM"}}}
	for _, p := range problems {
		table.add(plain, p.Namespace, p.Name, p.Problem)
	}
	return table
}

// pendingRows returns a row with the diagnosis of each pending pod. wide adds its position in the queue, and kube-scheduler's message, unshortened.
func pendingRows(pods []PendingPod, wide bool) rows {
	header := row{bold, []string{"NAMESPACE", "NAME", "REQUEST", "CAUSE", "WHY"}}
	if wide {
		header.cells = append(header.cells, "AHEAD", "SINCE", "SCHEDULER", "SCHEDULER SAYS")
	}
	table := rows{header}
	for _, pod := range pods {
		cells := []string{pod.Namespace, pod.Name, pod.requestText(), pod.Cause.String(), pod.Explanation}
		if wide {
			ahead := "-"
			if pod.Ahead != nil {
				ahead = strconv.Itoa(*pod.Ahead)
			}
			since := "-"
			if !pod.Since.IsZero() {
				since = pod.Since.Format(time.RFC3339)
			}
			cells = append(cells, ahead, since, pod.Scheduler, pod.Reason)
		}
		table.add(plain, cells...)
	}
	return table
}

// requestText returns the request as one word: the memory, with several cards their number and the memory on each ("2x8"), and the
// cores on each card if the pod asks for some ("2x8,25%").
func (p *PendingPod) requestText() string {
	text, n := p.Request.String(), max(p.Cards, 1)
	if n > 1 {
		text = fmt.Sprintf("%dx%d", n, gpu.Pod{Request: p.Request, Cards: n}.Demand().Memory)
	}
	if p.Cores > 0 {
		text += fmt.Sprintf(",%d%%", p.Cores.PerCard(n))
	}
	return text
}

// shorten shortens kube-scheduler's message. It removes the part on why preemption doesn't help.
func shorten(message string) string {
	return diagnosis.Excerpt(reasons.WithoutPreemption(oneLine(message)))
}
