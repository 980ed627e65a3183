import java.io.File;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** A NameNode and a DataNode in one process, until its standard input ends. */
public class MiniCluster {
    public static void main(String[] arguments) throws Exception {
        File folder = new File(arguments[0]);
        MiniDFSCluster cluster = new MiniDFSCluster.Builder(new Configuration(), folder).build();
        cluster.waitActive();
        System.out.println("listening on " + cluster.getNameNodePort());
        System.out.flush();
        while (System.in.read() >= 0) {}
        cluster.shutdown();
        System.exit(0);
    }
}
