// kubectl as it comes, for the tests that run what the documents say: Kubernetes' own main package lies in a module that
// can't be required beside helm.
package main

import (
	"k8s.io/kubectl/pkg/cmd"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	cmdutil.CheckErr(cmd.NewDefaultKubectlCommand().Execute())
}
