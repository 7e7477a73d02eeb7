package inspect

import "bytes"

// writePending writes a row with the diagnosis of each pending pod. wide adds kube-scheduler's message, unshortened. It
// writes nothing if there are none.
func writePending(out *bytes.Buffer, report Report, f format) {
	header := row{bold, []string{"NAMESPACE", "NAME", "REQUEST", "CAUSE", "WHY"}}
	if f.wide {
		header.cells = append(header.cells, "SCHEDULER", "SCHEDULER SAYS")
	}
	table := rows{header}
	for _, pod := range report.PendingPods {
		cells := []string{pod.Namespace, pod.Name, pod.Request.String(), string(pod.Cause), pod.Explanation}
		if f.wide {
			cells = append(cells, pod.Scheduler, pod.Reason)
		}
		table.add(plain, cells...)
	}
	table.writeAlone(out, f)
}
