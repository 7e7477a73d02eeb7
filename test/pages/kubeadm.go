package pages

import "fmt"

// Kubeadm holds the commands of docs/install.md for a kubeadm control-plane node, as bash scripts. Install and Undo
// include the edits of kubeadm.yaml that the page describes.
type Kubeadm struct {
	// Install writes kube-scheduler's manifest with the extender. Upload stores the configuration in the cluster.
	Install, Upload string
	// Restart restarts kube-scheduler. Logs prints the end of its log.
	Restart, Logs string
	// Restore writes the manifest from the stored configuration. Undo removes the extender, also after Upload.
	Restore, Undo string
}

// ReadKubeadm reads the commands from the page.
func ReadKubeadm() (k Kubeadm, err error) {
	const page = "docs/install.md"
	blocks := map[string][]string{}
	for heading, count := range map[string]int{"kubeadm": 6, "Replace the configuration": 1, "kube-scheduler does not come up": 2, "Undo": 2} {
		if blocks[heading], err = Commands(page, heading); err != nil {
			return k, err
		}
		if got := len(blocks[heading]); got != count {
			return k, fmt.Errorf("%s shows %d blocks of commands under %q, want %d", page, got, heading, count)
		}
	}
	install, notUp, undo := blocks["kubeadm"], blocks["kube-scheduler does not come up"], blocks["Undo"]
	// The page names the line that the entries replace.
	const line = "scheduler: {}\n"
	entries := install[2]
	return Kubeadm{
		Install: install[0] + install[1] + replace(line, entries) + install[3] + install[4], Upload: install[5],
		Restart: blocks["Replace the configuration"][0],
		Logs:    notUp[0], Restore: notUp[1],
		Undo: undo[0] + replace(entries, line) + undo[1],
	}, nil
}

// replace returns commands that replace lines of kubeadm.yaml. They fail if the lines are missing.
func replace(before, after string) string {
	return fmt.Sprintf(`before='%s' after='%s' text="$(<kubeadm.yaml)"$'\n'
[[ $text == *"$before"* ]]
printf '%%s' "${text/"$before"/"$after"}" > kubeadm.yaml
`, before, after)
}
